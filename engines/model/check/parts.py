"""Drafter, vision tower, Engram classes and quantisers against a fixture's arrays."""

from pathlib import Path

import numpy as np
import torch
from shoal.engines.model import quant
from shoal.engines.model.check.report import Array, Finding, FixtureError, Reference, read_arrays, stems
from shoal.engines.model.check.trace import SUFFIX_GRID, SUFFIX_PATCHES, Prompt, Trace, run
from shoal.engines.model.decoder import Model
from shoal.engines.model.drafter import MainKeys, main_features, main_kv
from shoal.engines.model.images import grid_of, layout, patches, preprocess, span_tokens
from shoal.engines.model.vision import VisionEncoder
from torch import Tensor

RESAMPLING = 0.02
FORMATS = {
    "swa": (quant.quantise_fp8, quant.dequantise_fp8),
    "main": (quant.quantise_fp4, quant.dequantise_fp4),
    "index": (quant.quantise_mxfp4, quant.dequantise_mxfp4),
}


def check_draft(reference: Reference, name: str, model: Model, prompts: dict[str, Prompt]) -> None:
    """One draft block after the first tokens of a prompt; `model` is in mode N0 and has its drafter.

    Raises FixtureError.
    """
    assert model.drafter is not None, "draft checks need the drafter's weights"
    prompt, position, golden = _draft_input(reference, name, model, prompts)
    _, taps, _ = run(model, prompt.first(position + 1))
    runner, at = model.runner(), torch.arange(position + 1)
    features = main_features(runner, model.drafter, taps)
    by = model.rows(at, torch.zeros_like(at, dtype=torch.bool), at.new_zeros(len(at), 0)).window_phases
    first = max(0, position + 1 - model.config.window)
    kept = tuple(
        model.numerics.window_row(kv)[first:].unsqueeze(0) for _, kv in main_kv(runner, model.drafter, features, by)
    )
    main = MainKeys(kept, torch.ones(1, position + 1 - first, dtype=torch.bool))
    trace = Trace()
    block = model.draft_from(torch.tensor([golden]), torch.tensor([position]), main, trace)
    reference.near(f"{name}.taps", taps)
    reference.near(f"{name}.main_x", features)
    reference.near(f"{name}.streams", trace.stacked("streams"))
    reference.equal_sets(f"{name}.router_topk", trace.stacked("router_topk"))
    reference.equal(f"{name}.tokens", block.tokens[0])
    for part in ("hidden", "normed", "base_logits", "logits", "confidence_raw", "confidence_normed"):
        reference.near(f"{name}.{part}", getattr(block, part)[0])


def check_pictures(reference: Reference, encoder: VisionEncoder) -> None:
    """Every picture of a file: own pre-processing, layout, tower and aligner in float32."""
    for stem in stems(reference.arrays, ".pixels"):
        canvas = preprocess(np.ascontiguousarray(reference.take(f"{stem}.pixels")), encoder.config)
        own, wanted = patches(canvas, encoder.config), reference.floats(stem + SUFFIX_PATCHES)
        reference.equal(stem + SUFFIX_GRID, np.asarray(grid_of(canvas, encoder.config)))
        _check_patches(reference, stem + SUFFIX_PATCHES, own, wanted)
        height, width = reference.take(f"{stem}.pixels").shape[:2]
        if reference.has(f"{stem}.token_types"):
            roles = span_tokens(layout(width, height, encoder.config))
            reference.equal(f"{stem}.token_types", np.asarray([int(role) for role in roles]))
        rows, columns = (int(v) for v in reference.take(stem + SUFFIX_GRID))
        features = encoder.tower(torch.from_numpy(wanted).to(torch.float32), (rows, columns))
        reference.near(f"{stem}.vit", features)
        reference.near(f"{stem}.aligner", encoder.align(features, (rows, columns)))


def check_quantisers(reference: Reference) -> None:
    """Bytes, values and stored layouts of each cache format; all equal."""
    for name, (quantise, dequantise) in FORMATS.items():
        if not reference.has(f"{name}.x"):
            continue
        data, scales = quantise(torch.from_numpy(reference.take(f"{name}.x")))
        reference.equal(f"{name}.data", data)
        reference.equal(f"{name}.scales", scales)
        reference.equal(f"{name}.values", dequantise(data, scales))
        reference.equal(f"{name}.rows", quant.join_rows(data, scales))
        for block in [n for n in reference.arrays if n.startswith(f"{name}.block")]:
            reference.equal(block, _stored_block(name, data, scales))
        if reference.has(f"{name}.labels"):
            reference.take(f"{name}.labels")


def check_classes(directory: Path, model: Model) -> list[Finding]:
    """The token classes of `engram_map.npy`, if the fixture has it."""
    path = directory / "engram_map.npy"
    if not path.exists():
        return []
    reference = Reference(path.name, {"classes": next(iter(read_arrays(path).values()))})
    reference.equal("classes", model.engram.class_of)
    return reference.findings


def _draft_input(reference: Reference, name: str, model: Model, prompts: dict[str, Prompt]) -> tuple[Prompt, int, int]:
    """A draft's prompt, the position that it follows and its first token."""
    asked = str(reference.take(f"{name}.prompt"))
    position, golden = (int(reference.take(f"{name}.{part}")) for part in ("position", "golden"))
    length, vocab = len(prompts[asked].token_ids) if asked in prompts else 0, model.config.text.vocab_size
    if not (0 <= position < length and 0 <= golden < vocab):
        raise FixtureError(
            f"{reference.file}: {name} follows position {position} of prompt {asked!r} ({length} tokens) with token "
            f"{golden} of {vocab}; name a prompt of this file, a position in it and a token id"
        )
    return prompts[asked], position, golden


def _stored_block(name: str, data: Tensor, scales: Tensor) -> Tensor:
    if name == "index":
        return quant.join_block_rows(data, scales)
    return quant.join_rows(data, scales).flatten()


def _check_patches(reference: Reference, name: str, own: Tensor, wanted: Array) -> None:
    have = own.to(torch.float64).view(wanted.shape).numpy() if own.numel() == wanted.size else None
    mean = float(np.abs(have - wanted).mean()) if have is not None else None
    passed = mean is not None and mean <= RESAMPLING
    finding = Finding(f"{reference.file} {name}", passed, mean, RESAMPLING, "absolute, mean (own pre-processing)")
    reference.findings.append(finding)
