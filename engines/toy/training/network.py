"""The network as it is trained: whole packed rows at once, differentiable, with the cache formats in the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.rope import frequencies
from shoal.engines.toy.training import fused
from shoal.engines.toy.training.attention import Masks, attend
from shoal.engines.toy.training.experts import Load, run_experts
from shoal.engines.toy.training.rows import Rows, row_masks
from shoal.engines.toy.training.selection import Selector
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]
Residual = tuple[Tensor, Tensor]
"""Streams [N, m, H] and the `pre` [N, m] with which the next reader collapses them."""
Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """How one stage of training runs the network.

    is_sparse: attention reads the indexer's choice only; else every visible entry. learns_index: add the divergence
    of the indexer's scores from attention's own weights.
    """

    is_sparse: bool = False
    learns_index: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """hidden [B, T, H] after the last norm; taps [B, T, taps x H]; index_loss, a scalar; loads of experts by layer."""

    hidden: Tensor
    taps: Tensor
    index_loss: Tensor
    loads: dict[str, Load]


@dataclass(frozen=True, slots=True)
class Phases:
    """cos and sin [B x T, pairs] of window-only layers and of layers that read entries."""

    window: tuple[Tensor, Tensor]
    sparse: tuple[Tensor, Tensor]


class Network:
    """The trunk's forward for training. Weights come with each call, as `Stacks.step_weights` makes them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        text = config.text
        self._phases: dict[tuple[int, int, torch.device], Phases] = {}
        self._window = frequencies(text.qk_rope_head_dim, text.rope_theta, None)
        self._sparse = frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.rope_scaling)

    def phases(self, batch: int, count: int, device: torch.device) -> Phases:
        """Phases of `batch` packed rows of `count` tokens, at positions 0 to count - 1 each.

        Packed documents start anywhere: only differences of positions matter.
        """
        if (batch, count, device) not in self._phases:
            at = torch.arange(count, dtype=torch.float32).repeat(batch).unsqueeze(1)
            angles = [(at * frequency).to(device) for frequency in (self._window, self._sparse)]
            window, sparse = ((angle.cos(), angle.sin()) for angle in angles)
            self._phases[batch, count, device] = Phases(window, sparse)
        return self._phases[batch, count, device]

    def forward(self, weights: Weights, rows: Rows, embedded: Tensor, options: Options) -> Output:
        """All layers over embedded rows [B, T, H] (BF16)."""
        run = _Run(self, weights, rows, options)
        return run.through(embedded)


class _Run:
    """One forward pass: the residual streams of N = B x T rows, and the compressed cache in use."""

    def __init__(self, network: Network, weights: Weights, rows: Rows, options: Options) -> None:
        self.config, self.weights, self.rows = network.config, weights, rows
        self.shape = rows.ids.shape
        self.phases = network.phases(self.shape[0], self.shape[1], rows.ids.device)
        self.masks = row_masks(rows, self.config)
        self.selector = Selector(self.config, self.masks, options.is_sparse, options.learns_index)
        self.loads: dict[str, Load] = {}
        self.entries: Tensor | None = None

    def through(self, embedded: Tensor) -> Output:
        text = self.config.text
        residual = enter(embedded.flatten(0, 1), text.hc_mult)
        taps = []
        for layer in range(self.config.n_layers):
            streams = self.remember(layer, residual[0])
            if layer in text.dspark_target_layer_ids:
                taps.append(streams.float().mean(1).bfloat16())
            residual = self.run_layer(layer, (streams, residual[1]))
        hidden = fused.read_streams(*residual, self.weights["norm.weight"], text.rms_norm_eps)
        return Output(
            hidden.unflatten(0, self.shape),
            torch.cat(taps, dim=-1).unflatten(0, self.shape),
            self.selector.loss(),
            self.loads,
        )

    def remember(self, layer: int, streams: Tensor) -> Tensor:
        """Streams with Engram's memory written into them, on layers that have one."""
        table = self.config.engram_table(layer)
        if table is None:
            return streams
        own = f"layers.{layer}.engram"
        looked_up = functional.embedding(
            self.rows.engram[..., table, :].flatten(0, 1), self.weights[f"{own}.embed.weight"]
        )
        projected = functional.linear(looked_up.flatten(1), self.weights[f"{own}.wkv.weight"])
        visible = (~self.rows.image_mask).flatten().float()
        gates = (self.weights[f"{own}.q_weight"], self.weights[f"{own}.k_weight"])
        return fused.engram_write(streams, projected, *gates, visible, self.config.text.rms_norm_eps)

    def run_layer(self, layer: int, residual: Residual) -> Residual:
        """Attention and experts of one layer."""
        own, image_mask = f"layers.{layer}", self.rows.image_mask.flatten()

        def experts(x: Tensor) -> Tensor:
            top = self.config.text.num_experts_per_tok
            y, self.loads[own] = run_experts(self.weights, f"{own}.ffn", x, image_mask, self.config, top)
            return y

        return run_block(self.weights, own, residual, (partial(self.attention, layer), experts), self.config)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """The attention sublayer's output [N, H] for normed rows [N, H]."""
        config, own = self.config, f"layers.{layer}.attn"
        ratio = config.ratio(layer)
        by = self.phases.sparse if ratio else self.phases.window
        # Rows stay flat in what is compiled: then it is compiled once for packed rows of every length.
        latents, q, kv = project(self.weights, own, x, by, config)
        q, kv = q.unflatten(0, self.shape), kv.unflatten(0, self.shape)
        if config.is_kv_source(layer):
            self.entries = self.compress(layer, x)
        if config.is_index_source(layer):
            self.selector.select(layer, self.weights, latents, x, by)
        window = self.masks.decoder_window if layer >= config.n_prefill_layer else self.masks.window
        masks = Masks(window, self.selector.chosen if ratio else None)
        out, mass = attend(q, kv, self.entries if ratio else None, masks, self.weights[f"{own}.attn_sink"])
        if mass is not None:
            self.selector.observe(mass)
        return grouped_output(self.weights, own, out, by, config.text.o_groups)

    def compress(self, layer: int, x: Tensor) -> Tensor:
        """Main entries [B, T / ratio, D] of a KV source; its index keys go to the selector."""
        own, ratio, eps = f"layers.{layer}.attn", self.config.ratio(layer), self.config.text.rms_norm_eps
        values = functional.linear(x, self.weights[f"{own}.compressor.wkv.weight"])
        if ratio > 1:
            gate = functional.linear(x, self.weights[f"{own}.compressor.wgate.weight"])
            values = fused.pool_pairs(torch.cat((gate, values), dim=-1).unflatten(0, (-1, ratio)))
        latents = fused.rms_norm(values, self.weights[f"{own}.compressor.norm.weight"], eps)
        cos, sin = (part[::ratio].contiguous() for part in self.phases.sparse)
        # The indexer learns from attention alone: nothing flows back from its keys.
        keys = functional.linear(latents.detach(), self.weights[f"{own}.indexer.wk.weight"])
        keys = fused.rms_norm(keys, self.weights[f"{own}.indexer.k_norm.weight"], eps)
        self.selector.new_source(layer, fused.index_rows(keys, cos, sin).unflatten(0, (self.shape[0], -1)))
        entries: Tensor = fused.main_rows(latents, cos, sin).unflatten(0, (self.shape[0], -1))
        return entries


def enter(x: Tensor, streams: int) -> Residual:
    """Rows [N, H] in every stream, to be read from stream 0 first."""
    pre = torch.zeros(len(x), streams, device=x.device)
    pre[:, 0] = 1
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous(), pre


def run_block(
    weights: Weights, name: str, residual: Residual, sublayers: tuple[Sublayer, Sublayer], config: ModelConfig
) -> Residual:
    """The two sublayers of one block, attention and experts, each with its norm and hyper-connection."""
    streams, pre = residual
    for part, sublayer in zip(("attn", "ffn"), sublayers, strict=True):
        x = fused.read_streams(streams, pre, weights[f"{name}.{part}_norm.weight"], config.text.rms_norm_eps)
        pre, post, comb = mix(weights, f"{name}.hc_{part}", streams, config.text.hc_eps)
        streams = fused.write_streams(streams, sublayer(x), post, comb)
    return streams, pre


def project(
    weights: Weights, name: str, x: Tensor, by: tuple[Tensor, Tensor], config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Query latents [N, r], rotated queries [N, heads, D] and window KV [N, D] of normed rows [N, H] at phases `by`."""
    (cos, sin), eps = by, config.text.rms_norm_eps
    latents = fused.rms_norm(
        functional.linear(x, weights[f"{name}.wq_a.weight"]), weights[f"{name}.q_norm.weight"], eps
    )
    q = functional.linear(latents, weights[f"{name}.wq_b.weight"]).unflatten(-1, (-1, config.text.head_dim))
    return latents, fused.rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), window_kv(weights, name, x, by, config)


def window_kv(weights: Weights, name: str, x: Tensor, by: tuple[Tensor, Tensor], config: ModelConfig) -> Tensor:
    """Window KV [N, D] of rows [N, H]; the drafter makes its main entries with it alone."""
    kv = functional.linear(x, weights[f"{name}.wkv.weight"])
    return fused.window_rows(kv, weights[f"{name}.kv_norm.weight"], config.text.rms_norm_eps, *by)


def mix(weights: Weights, name: str, streams: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """pre [N, m], post [N, m], comb [N, m, m] of a sublayer's hyper-connection."""
    products = functional.linear(streams.flatten(1).float(), weights[f"{name}_fn"])
    inverse = fused.inverse_rms(streams)
    pre, post, comb = fused.mixing_weights(products, inverse, weights[f"{name}_base"], weights[f"{name}_scale"], eps)
    return pre, post, comb


def grouped_output(weights: Weights, name: str, out: Tensor, by: tuple[Tensor, Tensor], groups: int) -> Tensor:
    """The output projection [N, H] of attention [B, T, heads, D], turned back at its N positions."""
    cos, sin = (part.unsqueeze(-2) for part in by)
    turned = fused.rotate(out.flatten(0, 1), cos, -sin).flatten(1)
    parts = turned.unflatten(-1, (groups, -1)).transpose(0, 1)
    low = torch.bmm(parts, weights[f"{name}.wo_a.weight"].unflatten(0, (groups, -1)).transpose(1, 2))
    return functional.linear(low.transpose(0, 1).flatten(1), weights[f"{name}.wo_b.weight"])
