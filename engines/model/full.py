"""Attention over one whole sequence without caches: dense masks, the measure that the cached forward is held to."""

from dataclasses import dataclass
from operator import itemgetter

import torch
from shoal.engines.model import compressor
from shoal.engines.model.attention import Keys, attend, output, queries
from shoal.engines.model.indexer import index_queries, index_scores
from shoal.engines.model.parameters import TrunkWeights
from shoal.engines.model.row_split import Move
from shoal.engines.model.selection import candidate_blocks, expand_blocks, top_entries
from shoal.engines.model.stack import LayerRunner, Rows
from torch import Tensor

ROW_TILE = 64


@dataclass(frozen=True, slots=True)
class Compressed:
    """All entries of one KV source: main KV [E, D] and index keys [E, index dim], as caches would read back."""

    main: Tensor
    keys: Tensor
    ratio: int


class FullAttention:
    """AttentionState of a sequence that starts at position 0; decoder layers see no key before `first_kept`."""

    def __init__(
        self, runner: LayerRunner, weights: TrunkWeights, length: int, first_kept: int, is_compact: bool
    ) -> None:
        self._config, self._numerics, self._probe = runner.config, runner.numerics, runner.probe
        self._weights, self._length, self._first_kept, self._is_compact = weights, length, first_kept, is_compact
        self._compressed: Compressed | None = None
        self._chosen: Tensor | None = None
        self._candidates: Tensor | None = None

    def compress(self, layer: int, x: Tensor, rows: Rows) -> None:
        """The entries of the complete groups of rows [T, H]."""
        weights = self._weights.layers[layer].compressor
        assert weights is not None, f"layer {layer} owns no compressor"
        ratio, numerics = self._config.ratio(layer), self._numerics
        if ratio == 1:
            latents = compressor.latents_of_rows(numerics, x, weights)
        else:
            partials = compressor.partial_rows(numerics, x, weights)
            groups = partials[: len(x) // ratio * ratio].unflatten(0, (-1, ratio))
            latents = compressor.pool(numerics, groups)
        first = torch.arange(len(latents), device=x.device) * ratio
        eps = self._config.text.rms_norm_eps
        main, keys = compressor.entries(numerics, latents, weights, rows.sparse_phases[first], eps)
        self._compressed = Compressed(numerics.main_row(main), numerics.index_row(keys), ratio)
        self._candidates = None
        self._probe.record("compressed_kv", layer, self._compressed.main)
        self._probe.record("index_keys", layer, self._compressed.keys)

    def truncate(self) -> Move | None:
        """In compact mode, the rows from `first_kept` on; one row at least."""
        if self._is_compact and self._first_kept > 0:
            return itemgetter(torch.arange(min(self._first_kept, self._length - 1), self._length))
        return None

    def attend(self, layer: int, latents: Tensor, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Attention output [T, H], a tile of rows at a time."""
        weights = self._weights.layers[layer]
        kv = self._numerics.window_row(kv)
        phases = rows.sparse_phases if self._config.ratio(layer) else rows.window_phases
        if weights.indexer is not None:
            self._select(layer, latents, x, rows)
        parts = []
        for start in range(0, len(x), ROW_TILE):
            tile = torch.arange(start, min(start + ROW_TILE, len(x)), device=x.device)
            q = queries(self._numerics, latents[tile], weights.attention, phases[tile])
            keys = self._keys(layer, tile, kv, rows.positions)
            out = attend(q.unsqueeze(0), keys, weights.attention.sink)
            parts.append(output(self._numerics, out.squeeze(0), weights.attention, phases[tile]))
        return torch.cat(parts)

    def _keys(self, layer: int, tile: Tensor, kv: Tensor, positions: Tensor) -> Keys:
        at = positions[tile].unsqueeze(1)
        lower = self._first_kept if layer >= self._config.n_prefill_layer else 0
        mask = (positions <= at) & (positions > at - self._config.window) & (positions >= lower)
        if self._config.ratio(layer):
            assert self._compressed is not None, f"layer {layer} reads a cache that no source has filled"
            assert self._chosen is not None, f"layer {layer} reads a selection that no source has made"
            kv = torch.cat((kv, self._compressed.main))
            mask = torch.cat((mask, self._chosen[tile]), dim=1)
        return Keys(kv.unsqueeze(0), mask.unsqueeze(0))

    def _select(self, layer: int, latents: Tensor, x: Tensor, rows: Rows) -> None:
        weights, text = self._weights.layers[layer].indexer, self._config.text
        assert weights is not None, f"layer {layer} owns no indexer"
        assert self._compressed is not None, f"layer {layer} selects from a cache that no source has filled"
        entries = len(self._compressed.keys)
        by = index_queries(self._numerics, latents.unsqueeze(0), x.unsqueeze(0), weights, rows.sparse_phases)
        scores = index_scores(self._numerics, by, self._compressed.keys.unsqueeze(0)).squeeze(0)
        visible = (rows.positions + 1).div(self._compressed.ratio, rounding_mode="floor")
        hidden = torch.arange(entries, device=x.device) >= visible.unsqueeze(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        self._probe.record("index_scores", layer, scores)
        if layer in self._config.candidate_consumers:
            assert self._candidates is not None, f"layer {layer} needs the candidate layer's blocks"
            scores = scores.masked_fill(~self._candidates, -torch.inf)
        chosen = top_entries(scores, text.index_topk)
        self._probe.record("index_topk", layer, chosen)
        mask = torch.zeros(len(x), entries + 1, dtype=torch.bool, device=x.device)
        self._chosen = mask.scatter_(1, torch.where(chosen < 0, entries, chosen), True)[:, :entries]
        if layer == text.candidate_source_layer_id:
            blocks = candidate_blocks(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)
            self._candidates = expand_blocks(blocks, text.candidate_block_size, entries)
            self._probe.record("candidates", layer, self._candidates)
