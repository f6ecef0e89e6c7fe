"""The drafter: main entries out of trunk features, one block of drafts for each sequence, Markov and confidence.

Source: published model.py (DSpark blocks), DeepInfer for the main cache. Drafts are hints: verification decides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from shoal.engines.model.attention import Keys, attend, output, queries, window_kv
from shoal.engines.model.cache import Caches
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.numerics import Numerics, product
from shoal.engines.model.parameters import DrafterWeights, LayerWeights, TrunkWeights
from shoal.engines.model.rope import Phases
from shoal.engines.model.stack import LayerRunner, Rows
from torch import Tensor

DraftChoice = Callable[[Tensor, int], Tensor]
"""Tokens int64 [S] out of corrected logits float32 [S, V] of draft number i (from 0); asked in order, once each."""


def largest(logits: Tensor, number: int) -> Tensor:
    """The greedy DraftChoice."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class MainKeys:
    """Main entries each draft block sees: per drafter layer values [S, K, D]; mask bool [S, K]."""

    layers: tuple[Tensor, ...]
    mask: Tensor


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Drafts of S sequences, block size n: tokens int64 [S, n] for the positions after the golden token.

    base_logits, logits float32 [S, n, V] before and after the Markov correction; hidden, normed [S, n, H] before and
    after the last norm; confidence_raw, confidence_normed [S, n] logits from either. Released heads take the raw one.
    """

    tokens: Tensor
    base_logits: Tensor
    logits: Tensor
    hidden: Tensor
    normed: Tensor
    confidence_raw: Tensor
    confidence_normed: Tensor


def main_features(runner: LayerRunner, weights: DrafterWeights, taps: Tensor) -> Tensor:
    """Main features [T, H] of the trunk's taps [T, taps * H]."""
    return runner.normed(runner.numerics.linear(taps, weights.main_proj), weights.main_norm)


def main_kv(runner: LayerRunner, weights: DrafterWeights, features: Tensor, by: Phases) -> Iterator[tuple[int, Tensor]]:
    """(layer id, window KV [T, D], unquantised) of each drafter layer for main features [T, H]."""
    eps = runner.config.text.rms_norm_eps
    for layer, block in zip(runner.config.drafter_layers, weights.layers, strict=True):
        yield layer, window_kv(runner.numerics, features, block.attention, by, eps)


def read_main_keys(config: ModelConfig, caches: Caches, slots: Tensor, positions: Tensor) -> MainKeys:
    """The main entries before and at `positions` [S] (the last accepted ones) from the rings of `slots` [S]."""
    at = positions.unsqueeze(1) + torch.arange(1 - config.window, 1, device=positions.device)
    mask = at >= 0
    rows = at % caches.slot_layout.ring_tokens
    read = (caches.read_window(layer, slots.unsqueeze(1), rows, mask, torch.float32) for layer in config.drafter_layers)
    return MainKeys(tuple(read), mask)


class BlockAttention:
    """AttentionState of draft blocks [S, n]: every draft sees the main entries and its whole block, both ways."""

    def __init__(
        self, numerics: Numerics, weights: DrafterWeights, first_layer: int, main: MainKeys, size: int
    ) -> None:
        self._numerics, self._weights, self._first, self._main, self._size = numerics, weights, first_layer, main, size

    def compress(self, layer: int, x: Tensor, rows: Rows) -> None:
        """A drafter layer owns no compressor."""
        raise AssertionError(f"drafter layer {layer} owns no compressor")

    def truncate(self) -> None:
        """Drafts are never truncated."""

    def attend(self, layer: int, latents: Tensor, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Attention output [S * n, H]; the block's own KV is used once and never stored."""
        block: LayerWeights = self._weights.layers[layer - self._first]
        shape = (-1, self._size)
        q = queries(self._numerics, latents, block.attention, rows.window_phases).unflatten(0, shape)
        own = self._numerics.window_row(kv).unflatten(0, shape)
        keys = torch.cat((self._main.layers[layer - self._first].to(own.dtype), own), dim=1)
        seen = torch.cat((self._main.mask, self._main.mask.new_ones(own.shape[:2])), dim=1)
        mask = seen.unsqueeze(1).expand(-1, self._size, -1)
        attended = attend(q, Keys(keys, mask), block.attention.sink).flatten(0, 1)
        return output(self._numerics, attended, block.attention, rows.window_phases)


def draft_block(
    runner: LayerRunner,
    trunk: TrunkWeights,
    weights: DrafterWeights,
    golden: Tensor,
    rows: Rows,
    main: MainKeys,
    choice: DraftChoice = largest,
) -> DraftBlock:
    """One block of drafts for S sequences, each token taken by `choice`.

    golden: int64 [S], the token sampled for the position after the last main entry; rows: facts of the S * n draft
    positions, which start at that position.
    """
    text = runner.config.text
    size, sequences = text.dspark_block_size, len(golden)
    tokens = torch.full((sequences, size), text.dspark_noise_token_id, dtype=torch.int64, device=golden.device)
    tokens[:, 0] = golden
    residual = runner.enter(trunk.embed[tokens.flatten()].to(runner.numerics.wide))
    state = BlockAttention(runner.numerics, weights, runner.config.n_layers, main, size)
    for layer, block in zip(runner.config.drafter_layers, weights.layers, strict=True):
        residual = runner.run_block(layer, block, residual, rows, state)
        runner.probe.record("streams", layer, residual.streams)
    hidden = runner.collapsed(residual).unflatten(0, (sequences, size))
    return _head(runner, trunk, weights, golden, hidden, choice)


def _head(
    runner: LayerRunner,
    trunk: TrunkWeights,
    weights: DrafterWeights,
    golden: Tensor,
    hidden: Tensor,
    choice: DraftChoice,
) -> DraftBlock:
    normed = runner.normed(hidden, weights.norm)
    base = product(normed, trunk.head.weight)
    previous, tokens, logits, embeds = golden, [], [], []
    for step in range(hidden.shape[1]):
        embeds.append(weights.markov_embed[previous].to(base.dtype))
        # Each step is corrected by the token drafted before it, so the steps run one after the other.
        logits.append((base[:, step] + product(embeds[-1], weights.markov_head.weight)).to(torch.float32))
        previous = choice(logits[-1], step)
        tokens.append(previous)
    markov = torch.stack(embeds, dim=1)

    def confidence(x: Tensor) -> Tensor:
        return product(torch.cat((x, markov), dim=-1), weights.confidence.weight).squeeze(-1).to(torch.float32)

    return DraftBlock(
        tokens=torch.stack(tokens, dim=1),
        base_logits=base.to(torch.float32),
        logits=torch.stack(logits, dim=1),
        hidden=hidden,
        normed=normed,
        confidence_raw=confidence(hidden),
        confidence_normed=confidence(normed),
    )
