"""The order of one layer, shared by every forward: what differs is only where attention finds its keys."""

from dataclasses import dataclass
from typing import Protocol

import torch
from shoal.engines.model import mhc
from shoal.engines.model.attention import project
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram_write import write_engram
from shoal.engines.model.moe import ALL_HERE, ExpertsPort, MoeRules, route, run_moe
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import Numerics
from shoal.engines.model.parameters import LayerWeights, TrunkWeights
from shoal.engines.model.rope import Phases
from shoal.engines.model.row_split import Move
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What T rows carry past their hidden values.

    positions int64 [T]; image_mask bool [T]; engram_rows int64 [T, Engram layers, columns]; phases of window-only
    layers and of layers that read a compressed cache.
    """

    positions: Tensor
    image_mask: Tensor
    engram_rows: Tensor
    window_phases: Phases
    sparse_phases: Phases

    def moved(self, move: Move) -> "Rows":
        """The same facts of the rows that `move` leads to."""
        return Rows(
            move(self.positions),
            move(self.image_mask),
            move(self.engram_rows),
            Phases(move(self.window_phases.turn)),
            Phases(move(self.sparse_phases.turn)),
        )


class AttentionState(Protocol):
    """Where attention's keys come from and go to; each forward has its own."""

    def compress(self, layer: int, x: Tensor, rows: Rows) -> None:
        """Add the entries that rows [T, H] of a KV source complete."""

    def truncate(self) -> Move | None:
        """At the first decoder layer: what takes values to those of the rows that go on, or None for all."""

    def attend(self, layer: int, latents: Tensor, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Attention output [T, H] for query latents, normed rows and unquantised window KV of the same rows."""


class Probe(Protocol):
    """Sees intermediate values by name and layer; the serving path has one that looks away."""

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Take note of a value that will not change."""


class Blind:
    """The probe that records nothing."""

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Streams [T, m, H] and the `pre` [T, m] with which the next sublayer collapses them."""

    streams: Tensor
    pre: Tensor


@dataclass(frozen=True, slots=True)
class StackOutput:
    """Rows that went through all layers: normed hidden [T, H] and drafter features [T, taps * H]."""

    hidden: Tensor
    taps: Tensor
    rows: Rows


@dataclass(frozen=True, slots=True)
class LayerRunner:
    """Runs layers of one model in one numeric mode."""

    config: ModelConfig
    numerics: Numerics
    probe: Probe
    experts: ExpertsPort = ALL_HERE

    def run_stack(self, weights: TrunkWeights, embedded: Tensor, rows: Rows, state: AttentionState) -> StackOutput:
        """All trunk layers over embedded rows [T, H], from replication into streams to the final norm."""
        residual, taps = self.enter(embedded), []
        for layer, layer_weights in enumerate(weights.layers):
            self.probe.record("streams", layer, residual.streams)
            self.probe.record("pre", layer, residual.pre)
            residual = self.remember(layer, layer_weights, residual, rows)
            if layer in self.config.text.dspark_target_layer_ids:
                taps.append(self.numerics.round_(residual.streams.mean(1)))
            x = self.read(residual, layer_weights.attn_norm)
            if layer_weights.compressor is not None:
                state.compress(layer, x, rows)
            move = state.truncate() if layer == self.config.n_prefill_layer else None
            if move is not None:
                residual = Residual(move(residual.streams), move(residual.pre))
                x, rows, taps = move(x), rows.moved(move), [move(tap) for tap in taps]
            residual = self.run_layer(layer, layer_weights, residual, x, rows, state)
        self.probe.record("streams", len(weights.layers), residual.streams)
        self.probe.record("pre", len(weights.layers), residual.pre)
        hidden = self.read(residual, weights.norm)
        return StackOutput(hidden, torch.cat(taps, dim=-1), rows)

    def enter(self, embedded: Tensor) -> Residual:
        """Embedded rows [T, H] replicated into every stream, to be read from stream 0 first."""
        count = self.config.text.hc_mult
        streams = embedded.unsqueeze(1).repeat(1, count, 1)
        return Residual(streams, mhc.first_pre(len(embedded), count, embedded))

    def collapsed(self, residual: Residual) -> Tensor:
        """The rows [T, H] that the next reader of the streams sees, rounded."""
        return self.numerics.round_(mhc.collapse(residual.streams, residual.pre))

    def read(self, residual: Residual, norm: Tensor) -> Tensor:
        """The normed input [T, H] of the next sublayer."""
        return self.normed(self.collapsed(residual), norm)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm with the text's eps, rounded."""
        return self.numerics.round_(rms_norm(x, weight, self.config.text.rms_norm_eps))

    def remember(self, layer: int, weights: LayerWeights, residual: Residual, rows: Rows) -> Residual:
        """The residual with a layer's Engram memory written into it, if the layer has one."""
        table = self.config.engram_table(layer)
        if weights.engram is None or table is None:
            return residual
        ids, eps = rows.engram_rows[:, table], self.config.text.rms_norm_eps
        streams = write_engram(self.numerics, residual.streams, ids, rows.image_mask, weights.engram, eps)
        return Residual(streams, residual.pre)

    def run_block(
        self, layer: int, weights: LayerWeights, residual: Residual, rows: Rows, state: AttentionState
    ) -> Residual:
        """One layer that owns no Engram, compressor or truncation (the drafter's)."""
        return self.run_layer(layer, weights, residual, self.read(residual, weights.attn_norm), rows, state)

    def run_layer(
        self, layer: int, weights: LayerWeights, residual: Residual, x: Tensor, rows: Rows, state: AttentionState
    ) -> Residual:
        """Attention and experts of one layer; `x` is the normed input that the streams collapse to."""
        text = self.config.text
        by = self._mix("hc_attn", layer, residual.streams, weights.hc_attn)
        phases = rows.sparse_phases if self.config.ratio(layer) else rows.window_phases
        latents, kv = project(self.numerics, x, weights.attention, phases, text.rms_norm_eps)
        out = state.attend(layer, latents, x, kv, rows)
        self.probe.record("attn_out", layer, out)
        residual = Residual(self.numerics.round_(mhc.write(residual.streams, out, by)), by.pre)
        by = self._mix("hc_ffn", layer, residual.streams, weights.hc_ffn)
        out = self._experts(layer, weights, self.read(residual, weights.ffn_norm), rows.image_mask)
        self.probe.record("ffn_out", layer, out)
        return Residual(self.numerics.round_(mhc.write(residual.streams, out, by)), by.pre)

    def _mix(self, name: str, layer: int, streams: Tensor, weights: mhc.HyperWeights) -> mhc.Mix:
        by = mhc.mix(streams, weights, self.config.text.hc_sinkhorn_iters, self.config.text.hc_eps)
        for part in ("pre", "post", "comb"):
            self.probe.record(f"{name}_{part}", layer, getattr(by, part))
        return by

    def _experts(self, layer: int, weights: LayerWeights, x: Tensor, image_mask: Tensor) -> Tensor:
        rules = self._rules(layer)
        if layer >= self.config.n_layers:
            image_mask = torch.zeros_like(image_mask)  # the drafter routes with the text bias only
        routing = route(x, weights.moe, image_mask, rules)
        self.probe.record("router_topk", layer, routing.choice)
        self.probe.record("router_weights", layer, routing.weights)
        if layer >= self.config.n_layers:  # a rank drafts for its own sequences, alone
            return run_moe(self.numerics, x, weights.moe, routing, rules.limit)
        return self.experts.run(layer, self.numerics, x, weights.moe, routing, rules.limit)

    def _rules(self, layer: int) -> MoeRules:
        text = self.config.text
        top = text.num_experts_per_tok if layer < self.config.n_layers else text.dspark_num_experts_per_tok
        return MoeRules(top, text.routed_scaling_factor, text.swiglu_limit)
