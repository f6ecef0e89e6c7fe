"""The trunk against a fixture: whole prompts in every mode, and single layers from the reference's own state."""

import dataclasses

import numpy as np
import torch
from shoal.engines.model.check.report import Reference
from shoal.engines.model.check.trace import Prompt, Trace, run
from shoal.engines.model.decoder import Model
from shoal.engines.model.full import FullAttention
from shoal.engines.model.numerics import Mode, Numerics
from shoal.engines.model.stack import Residual
from torch import Tensor

ROBUST_CHOICES = 4096
"""`index_topk` and `candidate_topk_blocks` of the fixture's arrays without discrete choices."""
STATISTICAL, ARGMAX_LEAST = 0.025, 0.5
QUANTISED_CACHE, LAYER = 1e-3, 0.01
SUBLAYERS = tuple(f"hc_{s}_{part}" for s in ("attn", "ffn") for part in ("pre", "post", "comb"))
SOURCES = ("compressed_kv", "index_keys", "index_scores")
QUANTISED_FLOAT32 = Numerics(torch.float32, quantise_cache=True, quantise_inputs=False)


def check_prompt(reference: Reference, model: Model, prompt: Prompt) -> None:
    """Compare everything that the fixture says about one prompt; `model` is in mode N0."""
    name, trace = prompt.name, Trace()
    hidden, taps, logits = run(model, prompt, trace)
    reference.near(f"{name}.logits_n0", logits)
    reference.near(f"{name}.final_hidden", hidden)
    reference.near(f"{name}.taps", taps)
    length, no_past = len(prompt.token_ids), torch.full((1, model.engram.lookback), -1, dtype=torch.int64)
    rows = model.engram.rows(prompt.token_ids, prompt.image_mask, (length,), no_past)
    reference.equal(f"{name}.engram_rows", rows)
    reference.equal_sets(f"{name}.index_topk", trace.stacked("index_topk"))
    _check_candidates(reference, f"{name}.candidates", model, trace, is_strict=True)
    _check_router(reference, name, trace)
    streams = trace.stacked("streams")
    reference.near(f"{name}.stream_norms", streams.norm(dim=-1))
    reference.near(f"{name}.streams", streams)
    for part in ("pre", "attn_out", "ffn_out", *SUBLAYERS):
        reference.near(f"{name}.{part}", trace.stacked(part))
    for part in SOURCES:
        for layer, value in trace.values[part].items():
            reference.near(f"{name}.{part}.{layer}", value)
    _check_modes(reference, model, prompt)
    if reference.has(f"{name}.n1_streams"):
        check_layers(reference, with_numerics(model, Numerics.of(Mode.N1)), prompt)


def with_numerics(model: Model, numerics: Numerics) -> Model:
    """The same weights in another mode."""
    return dataclasses.replace(model, numerics=numerics)


def without_choices(model: Model) -> Model:
    """The same weights where every expert and every entry is chosen, so that nothing hangs on a near tie."""
    text = dataclasses.replace(
        model.config.text,
        index_topk=ROBUST_CHOICES,
        candidate_topk_blocks=ROBUST_CHOICES,
        num_experts_per_tok=model.config.text.n_routed_experts,
    )
    return dataclasses.replace(model, config=dataclasses.replace(model.config, text=text))


def check_layers(reference: Reference, model: Model, prompt: Prompt) -> None:
    """Each layer alone in bfloat16, started from the reference's streams at its boundary."""
    name, trace = f"{prompt.name}.n1_", Trace()
    streams, pre = (torch.from_numpy(reference.floats(name + part)) for part in ("streams", "pre"))
    runner, length = model.runner(trace), len(prompt.token_ids)
    no_past = torch.full((1, model.engram.lookback), -1, dtype=torch.int64)
    engram_rows = model.engram.rows(prompt.token_ids, prompt.image_mask, (length,), no_past)
    rows = model.rows(torch.arange(length), prompt.image_mask, engram_rows)
    state = FullAttention(runner, model.trunk, length, first_kept=0, is_compact=False)
    reached = [runner.enter(model.embed(prompt.token_ids, prompt.image_mask, prompt.image_rows))]
    for layer, weights in enumerate(model.trunk.layers):
        residual = runner.remember(layer, weights, Residual(streams[layer], pre[layer]), rows)
        x = runner.read(residual, weights.attn_norm)
        if weights.compressor is not None:
            state.compress(layer, x, rows)
        reached.append(runner.run_layer(layer, weights, residual, x, rows, state))
    reference.alike(f"{name}streams", torch.stack([residual.streams for residual in reached]), LAYER)
    reference.alike(f"{name}pre", torch.stack([residual.pre for residual in reached]), LAYER)
    reference.alike(f"{name}final_hidden", runner.read(Residual(streams[-1], pre[-1]), model.trunk.norm), LAYER)
    for part in ("attn_out", "ffn_out"):
        reference.alike(f"{name}{part}", trace.stacked(part), LAYER)
    for part in SOURCES:
        for layer, value in trace.values[part].items():
            reference.alike(f"{name}{part}.{layer}", value, LAYER)
    # Rounding may tip a near tie between the two implementations: choices are shown, their effect is bounded above.
    reference.equal_sets(f"{name}router_topk", trace.stacked("router_topk"), is_strict=False)
    reference.equal_sets(f"{name}index_topk", trace.stacked("index_topk"), is_strict=False)
    _check_candidates(reference, f"{name}candidates", model, trace, is_strict=False)


def _check_modes(reference: Reference, model: Model, prompt: Prompt) -> None:
    name = prompt.name

    def logits(numerics: Numerics, is_robust: bool) -> Tensor:
        chosen = without_choices(model) if is_robust else model
        return run(with_numerics(chosen, numerics), prompt)[2]

    if reference.has(f"{name}.logits_robust_n0"):
        reference.near(f"{name}.logits_robust_n0", logits(model.numerics, is_robust=True))
    if reference.has(f"{name}.logits_n0q"):
        steady = int(reference.take(f"{name}.n0q_rows"))
        reference.near(f"{name}.logits_n0q", logits(QUANTISED_FLOAT32, is_robust=False), QUANTISED_CACHE, steady)
    for suffix, numerics in (("n0q", QUANTISED_FLOAT32), ("n1", Numerics.of(Mode.N1))):
        if reference.has(f"{name}.logits_robust_{suffix}"):
            value = logits(numerics, is_robust=True)
            reference.alike(f"{name}.logits_robust_{suffix}", value, STATISTICAL, ARGMAX_LEAST)
    if reference.has(f"{name}.logits_n1"):
        reference.reported(f"{name}.logits_n1", logits(Numerics.of(Mode.N1), is_robust=False))


def _check_candidates(reference: Reference, name: str, model: Model, trace: Trace, is_strict: bool) -> None:
    if not reference.has(name):
        return
    source = model.config.text.candidate_source_layer_id
    mask = trace.values["candidates"][source]
    rows, entries = mask.shape
    visible = np.arange(entries) < (np.arange(rows)[:, None] + 1) // model.config.ratio(source)
    reference.equal(name, mask, visible, is_strict)


def _check_router(reference: Reference, name: str, trace: Trace) -> None:
    choice, weights = trace.stacked("router_topk"), trace.stacked("router_weights")
    reference.equal_sets(f"{name}.router_topk", choice)
    if not reference.has(f"{name}.router_weights"):
        return
    # Weights follow the order of the reference's experts; a row with other experts fails above.
    wanted = torch.from_numpy(reference.take(f"{name}.router_topk").astype(np.int64))
    order, wanted_order = choice.argsort(-1), wanted.argsort(-1)
    placed = torch.empty_like(weights).scatter_(-1, wanted_order, weights.gather(-1, order))
    reference.close(f"{name}.router_weights", placed)
