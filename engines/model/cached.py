"""Attention over paged blocks and state slots: any chunks, any placement, many sequences at once.

Values always come back through the stored bytes, also those of the step's own rows, so a token's keys are the same
whether they were computed in this step, in an earlier one or in another engine.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model import compressor
from shoal.engines.model.attention import Keys, attend, output, queries
from shoal.engines.model.cache import Caches
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.indexer import IndexQueries, index_queries, index_scores
from shoal.engines.model.parameters import CompressorWeights, TrunkWeights
from shoal.engines.model.placement import (
    EntryPlan,
    Sequences,
    Tile,
    TileSizes,
    WindowPlan,
    counted,
    entry_plan,
    window_plan,
)
from shoal.engines.model.rope import phases
from shoal.engines.model.selection import candidate_blocks, expand_blocks, top_entries
from shoal.engines.model.stack import LayerRunner, Rows
from torch import Tensor

TILE_NUMBERS_MAX = 2 << 20
"""Values a tile of query rows may hold at once (16 MiB in float64); bounds the memory of a chunk of any length."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Entries that rows may attend to: values float32 [N, D], and index int64 [T, k] into them, -1 = none.

    `bases` int64 [S] is where each sequence's entries start when all of them were read, else None.
    """

    values: Tensor
    index: Tensor
    bases: Tensor | None


class CachedAttention:
    """AttentionState of one step over `caches`. `is_compact`: rows before `sequences.lower` stop at the decoder."""

    def __init__(
        self,
        runner: LayerRunner,
        weights: TrunkWeights,
        caches: Caches,
        sequences: Sequences,
        is_compact: bool,
        frequencies: Tensor,
    ) -> None:
        self._config, self._numerics = runner.config, runner.numerics
        self._weights, self._caches, self._frequencies = weights, caches, frequencies
        self._sequences, self._is_compact = sequences, is_compact
        self._of_rows = sequences.of_rows()
        self.windows = self._plan(sequences, torch.zeros_like(sequences.lower), torch.zeros_like(sequences.lower))
        self._entry_plans = {
            ratio: entry_plan(sequences, ratio, caches.shape.block_tokens)
            for ratio in {self._config.ratio(layer) for layer in self._config.text.kv_source_layer_ids}
        }
        self._source = -1
        self._keys: Tensor | None = None
        self._pool: Pool | None = None
        self._chosen: Tensor | None = None
        self._candidates: Tensor | None = None

    def truncate(self) -> Tensor | None:
        """Narrow the windows to kept positions; in compact mode also the rows (one of each sequence at least)."""
        lower, kept = self._sequences.lower, None
        if self._is_compact and bool((lower > self._sequences.starts).any()):
            self._sequences, kept = self._sequences.from_position(lower)
            self._of_rows = self._sequences.of_rows()
        write_lower = lower if self._is_compact else torch.zeros_like(lower)
        self.windows = self._plan(self._sequences, lower, write_lower)
        return kept

    def last_rows(self) -> Tensor:
        """The index of each sequence's last row, int64 [S], among the rows that go on."""
        return torch.cumsum(self._sequences.lens, 0) - 1

    def compress(self, layer: int, x: Tensor, rows: Rows) -> None:
        """Write the main KV and index keys of entries that rows [T, H] complete, and the accumulators."""
        weights = self._weights.layers[layer].compressor
        assert weights is not None, f"layer {layer} owns no compressor"
        numerics, ratio = self._numerics, self._config.ratio(layer)
        plan = self._entry_plans[ratio]
        self._source, self._keys, self._pool, self._chosen, self._candidates = layer, None, None, None, None
        if ratio == 1:
            latents = compressor.latents_of_rows(numerics, x, weights)[plan.members.squeeze(1)]
        else:
            latents = compressor.pool(numerics, self._accumulate(layer, x, weights, ratio, plan))
        by = phases(self._frequencies, plan.first, numerics.wide)
        main, keys = compressor.entries(numerics, latents, weights, by, self._config.text.rms_norm_eps)
        self._caches.write_entries(layer, "index", plan.blocks, plan.rows, keys)
        self._caches.write_entries(layer, "main", plan.blocks, plan.rows, main)

    def attend(self, layer: int, latents: Tensor, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Attention output [T, H]; also writes the layer's window ring."""
        weights = self._weights.layers[layer]
        by = rows.sparse_phases if self._config.ratio(layer) else rows.window_phases
        keys = self.exchange_window(layer, kv)
        if weights.indexer is not None:
            self._select(layer, latents, x, rows)
        out = torch.empty_like(x)
        for tile in self.windows.tiles:
            q = queries(self._numerics, latents[tile.rows], weights.attention, by[tile.rows])
            attended = attend(q, self._tile_keys(layer, tile, keys), weights.attention.sink)
            part = output(self._numerics, attended, weights.attention, by[tile.rows])
            out[tile.rows.flatten()] = part.flatten(0, 1)
        return out

    def exchange_window(self, layer: int, kv: Tensor) -> Tensor:
        """Read the history of a layer's ring, write the step's rows [T, D]; the key pool float32 [history + T, D]."""
        plan = self.windows
        history = self._caches.read_window(layer, self._sequences.slots.unsqueeze(1), plan.history_rows)
        # Bytes that nobody wrote may decode to NaN, and a masked NaN would still spoil a weighted sum.
        history = torch.where(plan.history_valid.unsqueeze(-1), history, 0.0)
        return torch.cat((history.flatten(0, 1), self.store_window(layer, kv)))

    def store_window(self, layer: int, kv: Tensor) -> Tensor:
        """Write the step's rows [T, D] of a layer's ring; the rows as they read back, float32 [T, D]."""
        plan = self.windows
        stored, values = self._caches.encode_window(kv)
        self._caches.write_window(layer, plan.written_slots, plan.written_rows, stored[plan.written])
        return values

    def _plan(self, sequences: Sequences, lower: Tensor, write_lower: Tensor) -> WindowPlan:
        ring_tokens = self._caches.slot_layout.ring_tokens
        sizes = tile_sizes(self._config, self._entries_max())
        return window_plan(sequences, lower, write_lower, self._config.window, ring_tokens, sizes)

    def _entries_max(self) -> int:
        return int(self._sequences.ends.max())

    def _accumulate(self, layer: int, x: Tensor, weights: CompressorWeights, ratio: int, plan: EntryPlan) -> Tensor:
        """Groups [E, ratio, 2, D] that complete in this step, out of the accumulators and rows [T, H]."""
        sequences, state = self._sequences, self._caches.accumulators(layer)
        partials = compressor.partial_rows(self._numerics, x, weights)
        depth = state.shape[1]
        past = sequences.starts.unsqueeze(1) + torch.arange(1 - ratio, 0, device=x.device)
        history = state[sequences.slots.unsqueeze(1), past % depth].to(x.dtype)
        positions = sequences.positions()
        kept = (sequences.ends[self._of_rows] - positions <= depth).nonzero().squeeze(1)
        state[sequences.slots[self._of_rows[kept]], positions[kept] % depth] = partials[kept].to(torch.float32)
        return torch.cat((history.flatten(0, 1), partials))[plan.members]

    def _select(self, layer: int, latents: Tensor, x: Tensor, rows: Rows) -> None:
        text = self._config.text
        keys = self._index_keys()
        entries = keys.shape[1]
        chosen = torch.full((len(x), min(text.index_topk, entries)), -1, dtype=torch.int64, device=x.device)
        is_source = layer == text.candidate_source_layer_id
        blocks_count = -(-entries // text.candidate_block_size)
        candidates = torch.zeros(len(x), blocks_count if is_source else 0, dtype=torch.bool, device=x.device)
        weights = self._weights.layers[layer].indexer
        assert weights is not None, f"layer {layer} owns no indexer"
        for tile in self.windows.tiles:
            at = tile.rows
            by = index_queries(self._numerics, latents[at], x[at], weights, rows.sparse_phases[at])
            flat = at.flatten()
            visible = (rows.positions[flat] + 1).div(self._config.ratio(layer), rounding_mode="floor")
            scores = self._scores(layer, by, keys[tile.sequences], visible, flat)
            chosen[flat] = top_entries(scores, text.index_topk)
            if is_source:
                candidates[flat] = candidate_blocks(
                    scores, visible, text.candidate_block_size, text.candidate_topk_blocks
                )
        if is_source:
            self._candidates = candidates
        self._chosen = chosen
        self._pool = self._read_pool(self._pool)

    def _scores(self, layer: int, by: IndexQueries, keys: Tensor, visible: Tensor, flat: Tensor) -> Tensor:
        """Index scores [rows of a tile, E], -inf where a row may not choose."""
        scores = index_scores(self._numerics, by, keys.to(self._numerics.wide)).flatten(0, 1)
        entries = scores.shape[-1]
        hidden = torch.arange(entries, device=scores.device) >= visible.unsqueeze(1)
        if layer in self._config.candidate_consumers:
            assert self._candidates is not None, f"layer {layer} needs the candidate layer's blocks"
            hidden |= ~expand_blocks(self._candidates[flat], self._config.text.candidate_block_size, entries)
        return scores.masked_fill(hidden, -torch.inf)

    def _index_keys(self) -> Tensor:
        """Index keys of the current source, float32 [S, E of the longest, index dim]; read once a source."""
        if self._keys is None:
            ratio, tables = self._config.ratio(self._source), self._sequences.tables
            first = torch.arange(int((self._sequences.ends // ratio).max()), device=tables.device) * ratio
            block_tokens = self._caches.shape.block_tokens
            blocks, rows = tables[:, first // block_tokens], (first % block_tokens // ratio).expand(len(tables), -1)
            self._keys = self._caches.read_entries(self._source, "index", blocks, rows)
        return self._keys

    def _read_pool(self, before: Pool | None) -> Pool:
        """The chosen entries' values: all of each sequence if that is less than one for each choice."""
        chosen, sequences = self._chosen, self._sequences
        assert chosen is not None, "entries are read after the selection"
        ratio, block_tokens = self._config.ratio(self._source), self._caches.shape.block_tokens
        if before is not None and before.bases is not None:
            return Pool(before.values, self._index(before.bases), before.bases)
        counts = sequences.ends // ratio
        if int(counts.sum()) < chosen.numel():
            ids = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
            first = counted(torch.zeros_like(counts), counts) * ratio
            blocks, bases = sequences.tables[ids, first // block_tokens], torch.cumsum(counts, 0) - counts
            index = self._index(bases)
        else:
            first = chosen.clamp_min(0) * ratio
            # A row without a choice reads some row of its table; the mask hides it.
            blocks, bases = sequences.tables[self._of_rows.unsqueeze(1), first // block_tokens], None
            index = torch.where(chosen < 0, -1, torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape))
            blocks, first = blocks.flatten(), first.flatten()
        values = self._caches.read_entries(self._source, "main", blocks, first % block_tokens // ratio)
        return Pool(values, index, bases)

    def _index(self, bases: Tensor) -> Tensor:
        assert self._chosen is not None, "entries are read after the selection"
        return torch.where(self._chosen < 0, -1, self._chosen + bases[self._of_rows].unsqueeze(1))

    def _tile_keys(self, layer: int, tile: Tile, window: Tensor) -> Keys:
        wide, width = self._numerics.wide, window.shape[-1]
        near = window[tile.keys].to(wide)
        if not self._config.ratio(layer):
            none = near.new_empty(*tile.rows.shape, 0, width)
            return Keys(near, tile.mask, none, tile.mask.new_empty(*tile.rows.shape, 0))
        pool = self._pool
        assert pool is not None, f"layer {layer} reads entries that no source has chosen"
        index = pool.index[tile.rows]
        mask = index >= 0
        if not len(pool.values):
            return Keys(near, tile.mask, near.new_zeros(*index.shape, width), mask)
        far = torch.where(mask.unsqueeze(-1), pool.values[index.clamp_min(0)], 0.0)
        return Keys(near, tile.mask, far.to(wide), mask)


def tile_sizes(config: ModelConfig, tokens: int) -> TileSizes:
    """Tile bounds for sequences of up to `tokens` tokens: a row's queries, entries and index scores."""
    text = config.text
    entries = min(text.index_topk, tokens)
    # Scores exist as product, rounded product and weighted product at once.
    row = (text.num_attention_heads * 2 + entries * 2) * text.head_dim + 3 * text.index_n_heads * tokens
    return TileSizes(TILE_NUMBERS_MAX, row, config.window * text.head_dim)
