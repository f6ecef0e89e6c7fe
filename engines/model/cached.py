"""Attention over paged blocks and state slots: any chunks, any placement, many sequences at once.

Values always come back through the stored bytes, also those of the step's own rows, so a token's keys are the same
whether they were computed in this step, in an earlier one or in another engine.
"""

from collections.abc import Sequence
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
    in_order,
    window_plan,
)
from shoal.engines.model.rope import phases
from shoal.engines.model.row_split import Move, RowSplit
from shoal.engines.model.selection import candidate_blocks, expand_blocks, top_entries
from shoal.engines.model.stack import LayerRunner, Rows
from torch import Tensor

TILE_NUMBERS_MAX = 2 << 20
"""Values a tile of query rows may hold at once (16 MiB in float64); bounds the memory of a chunk of any length."""

SHARED_ENTRIES_MAX = 5
"""Up to so many entries for each one chosen, a tile attends to all of them under a mask. Measured on one core: a
gathered entry costs about as much as five entries of one large product."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Entries that rows may attend to: values [N, D], all finite, and `chosen` int64 [T, k], -1 = none.

    `is_full`: no row has less than k choices. `bases` int64 [S] is where each sequence's entries start when all of
    them were read: `chosen` counts from there. When it is None, each row's own choices were read, k of them a row in
    the order of `chosen`.
    """

    values: Tensor
    chosen: Tensor
    is_full: bool
    bases: Tensor | None


class CachedAttention:
    """AttentionState of one step over `caches`. `is_compact`: rows before `sequences.lower` stop at the decoder.

    Rows [T, ...] that come and go are this rank's own by `split`; what caches need of the others' is gathered.
    """

    def __init__(
        self,
        runner: LayerRunner,
        weights: TrunkWeights,
        caches: Caches,
        sequences: Sequences,
        split: RowSplit,
        is_compact: bool,
        frequencies: Tensor,
    ) -> None:
        self._config, self._numerics = runner.config, runner.numerics
        self._weights, self._caches, self._frequencies = weights, caches, frequencies
        self._sequences, self._split, self._is_compact = sequences, split, is_compact
        self._of_rows = sequences.of_rows()
        self._rows_count = len(self._of_rows)
        self.windows = self._plan(sequences, torch.zeros_like(sequences.lower), torch.zeros_like(sequences.lower))
        self._entry_plans = {
            ratio: entry_plan(sequences, ratio, caches.shape.block_tokens)
            for ratio in {self._config.ratio(layer) for layer in self._config.text.kv_source_layer_ids}
        }
        self._source = -1
        self._keys: Tensor | None = None
        self._pool: Pool | None = None
        self._candidates: Tensor | None = None

    def truncate(self) -> Move | None:
        """Narrow the windows to kept positions; in compact mode also the rows (one of each sequence at least)."""
        lower, move = self._sequences.lower, None
        if not bool(lower.any()):
            return None
        if self._is_compact and bool((lower > self._sequences.starts).any()):
            self._sequences, kept = self._sequences.from_position(lower)
            self._of_rows = self._sequences.of_rows()
            gather, split = self._split.gatherer(kept), self._split.of_lens(self._sequences.lens)
            self._split = split

            def move(values: Tensor) -> Tensor:
                return split.own(gather(values))

        write_lower = lower if self._is_compact else torch.zeros_like(lower)
        self.windows = self._plan(self._sequences, lower, write_lower)
        return move

    def gather(self, values: Tensor) -> Tensor:
        """Values of all rows that go on, on every rank, out of its own."""
        return self._split.gather(values)

    def gather_last(self, values: Tensor) -> Tensor:
        """Values [S, ...] of each sequence's last row, on every rank, out of its own rows."""
        return self._split.gatherer(torch.cumsum(self._sequences.lens, 0) - 1)(values)

    def gather_all_of(self, members: Sequence[int], values: Tensor) -> Tensor:
        """Values of all rows of some sequences, end to end, on every rank, out of its own rows."""
        ids = torch.tensor(members, dtype=torch.int64, device=self._sequences.lens.device)
        return self._split.gatherer(counted(self._sequences.offsets[ids], self._sequences.lens[ids]))(values)

    def compress(self, layer: int, x: Tensor, rows: Rows) -> None:
        """Write the main KV and index keys of entries that rows [T, H] complete, and the accumulators."""
        weights = self._weights.layers[layer].compressor
        assert weights is not None, f"layer {layer} owns no compressor"
        numerics, ratio = self._numerics, self._config.ratio(layer)
        plan = self._entry_plans[ratio]
        self._source, self._keys, self._pool, self._candidates = layer, None, None, None
        if ratio == 1:
            latents = self._split.gather(compressor.latents_of_rows(numerics, x, weights), numerics.activation)
            latents = latents[plan.members.squeeze(1)]
        else:
            groups = self._accumulate(layer, x, weights, ratio, plan)
            if not groups.numel():
                return
            latents = compressor.pool(numerics, groups)
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
        parts = []
        for tile in self.windows.tiles:
            turn = by.of_tile(tile)
            q = queries(self._numerics, tile.take(latents), weights.attention, turn)
            attended = attend(q, self._tile_keys(layer, tile, keys), weights.attention.sink)
            parts.append(output(self._numerics, attended, weights.attention, turn).flatten(0, 1))
        return in_order(self.windows.tiles, parts)

    def exchange_window(self, layer: int, kv: Tensor) -> Tensor:
        """Read the history of a layer's ring, write the step's rows [T, D]; the key pool [history + T, D].

        When one tile holds all rows, the pool comes in the tile's own order, [S, K, D].
        """
        plan, slots = self.windows, self._sequences.slots.unsqueeze(1)
        wide = self._numerics.wide
        if plan.reads_own:
            self.store_window(layer, kv)
            return self._caches.read_window(layer, slots, plan.history_rows, plan.history_valid, wide)
        history = self._caches.read_window(layer, slots, plan.history_rows, plan.history_valid, wide)
        own = self._caches.decode_window(self.store_window(layer, kv), wide)
        if plan.tiles[0].is_whole:
            return torch.cat((history, plan.tiles[0].take(own)), dim=1)
        return torch.cat((history.flatten(0, 1), own))

    def store_window(self, layer: int, kv: Tensor) -> Tensor:
        """Write the step's rows [T, D] of a layer's ring; the bytes of everybody's rows, uint8 [T, row bytes]."""
        plan = self.windows
        stored = self._split.gather(self._caches.encode_window(kv))
        written = stored if plan.written.shape[0] == stored.shape[0] else stored[plan.written]
        self._caches.write_window(layer, plan.written_slots, plan.written_rows, written)
        return stored

    def _plan(self, sequences: Sequences, lower: Tensor, write_lower: Tensor) -> WindowPlan:
        ring_tokens = self._caches.slot_layout.ring_tokens
        sizes = tile_sizes(self._config, self._entries_max())
        return window_plan(sequences, self._split.spans, lower, write_lower, self._config.window, ring_tokens, sizes)

    def _entries_max(self) -> int:
        return int(self._sequences.ends.max())

    def _accumulate(self, layer: int, x: Tensor, weights: CompressorWeights, ratio: int, plan: EntryPlan) -> Tensor:
        """Groups [E, ratio, 2, D] that complete in this step, out of the accumulators and rows [T, H]."""
        sequences, state = self._sequences, self._caches.accumulators(layer)
        partials = self._split.gather(compressor.partial_rows(self._numerics, x, weights), torch.float32)
        depth = state.shape[1]
        past = sequences.starts.unsqueeze(1) + torch.arange(1 - ratio, 0, device=x.device)
        history = state[sequences.slots.unsqueeze(1), past % depth].to(x.dtype)
        positions = sequences.positions()
        kept = (sequences.ends[self._of_rows] - positions <= depth).nonzero().squeeze(1)
        state[sequences.slots[self._of_rows[kept]], positions[kept] % depth] = partials[kept].to(torch.float32)
        return torch.cat((history.flatten(0, 1), partials))[plan.members]

    def _select(self, layer: int, latents: Tensor, x: Tensor, rows: Rows) -> None:
        text, tiles = self._config.text, self.windows.tiles
        keys = self._index_keys()
        weights = self._weights.layers[layer].indexer
        assert weights is not None, f"layer {layer} owns no indexer"
        chosen, candidates = [], []
        for tile in tiles:
            turn = rows.sparse_phases.of_tile(tile)
            by = index_queries(self._numerics, tile.take(latents), tile.take(x), weights, turn)
            visible = (tile.take(rows.positions).flatten() + 1).div(self._config.ratio(layer), rounding_mode="floor")
            scores = self._scores(layer, tile, by, tile.of_sequences(keys), visible)
            chosen.append(top_entries(scores, text.index_topk))
            if layer == text.candidate_source_layer_id:
                candidates.append(
                    candidate_blocks(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)
                )
        if candidates:
            self._candidates = in_order(tiles, candidates)
        self._pool = self._read_pool(self._pool, in_order(tiles, chosen))

    def _scores(self, layer: int, tile: Tile, by: IndexQueries, keys: Tensor, visible: Tensor) -> Tensor:
        """Index scores [rows of a tile, E], -inf where a row may not choose."""
        scores = index_scores(self._numerics, by, keys).flatten(0, 1)
        entries = scores.shape[-1]
        if self._rows_count > 1:  # a step's lone row is the newest and sees every entry that there is
            scores.masked_fill_(torch.arange(entries, device=scores.device) >= visible.unsqueeze(1), -torch.inf)
        if layer in self._config.candidate_consumers:
            assert self._candidates is not None, f"layer {layer} needs the candidate layer's blocks"
            kept = tile.take(self._candidates).flatten(0, 1)
            scores.masked_fill_(~expand_blocks(kept, self._config.text.candidate_block_size, entries), -torch.inf)
        return scores

    def _index_keys(self) -> Tensor:
        """Index keys of the current source, [S, E of the longest, index dim]; read once a source."""
        if self._keys is None:
            entries = int(self._sequences.ends.max()) // self._config.ratio(self._source)
            keys = self._caches.read_blocks(self._source, "index", self._sequences.tables, self._numerics.wide)
            self._keys = keys[:, :entries]
        return self._keys

    def _read_pool(self, before: Pool | None, chosen: Tensor) -> Pool:
        """The chosen entries' values: all of each sequence if that is less than one for each choice."""
        sequences, is_full = self._sequences, bool((chosen >= 0).all())
        if before is not None and before.bases is not None:
            return Pool(before.values, chosen, is_full, before.bases)
        ratio = self._config.ratio(self._source)
        of_block, counts, bases = self._caches.shape.block_tokens // ratio, sequences.ends // ratio, None
        is_all = int(counts.sum()) < chosen.numel()
        if is_all:
            ids = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
            entries = counted(torch.zeros_like(counts), counts)
            blocks, bases = sequences.tables[ids, entries // of_block], torch.cumsum(counts, 0) - counts
        else:
            entries = chosen.clamp_min(0)
            of_rows = self._split.own(self._of_rows)
            blocks = sequences.tables[of_rows.unsqueeze(1), entries // of_block].flatten()
            entries = entries.flatten()
        values = self._caches.read_entries(self._source, "main", blocks, entries % of_block, self._numerics.wide)
        if not is_all and not is_full:
            # A row without a choice read some row of its table, which may hold anything.
            values.masked_fill_((chosen < 0).view(-1, 1), 0.0)
        return Pool(values, chosen, is_full, bases)

    def _tile_keys(self, layer: int, tile: Tile, window: Tensor) -> Keys:
        near = window if tile.is_whole else window[tile.keys]
        mask = None if tile.sees_all else tile.mask
        if not self._config.ratio(layer):
            return Keys(near, mask)
        pool = self._pool
        assert pool is not None, f"layer {layer} reads entries that no source has chosen"
        if not pool.values.shape[0]:
            return Keys(near, mask)
        chosen = tile.take(pool.chosen)
        if pool.bases is None:
            far = tile.take(pool.values.view(*pool.chosen.shape, -1))
            return Keys(near, mask, far, None if pool.is_full else chosen >= 0)
        if tile.sequences.shape[0] == 1:
            shared = self._shared_entries(pool, chosen, int(tile.sequences))
            if shared is not None:
                values, seen = shared
                return Keys(torch.cat((near, values), dim=1), torch.cat((tile.mask, seen), dim=-1))
        index = chosen.clamp_min(0) + pool.bases[tile.sequences][:, None, None]
        far = pool.values.index_select(0, index.flatten().clamp_max_(len(pool.values) - 1))
        return Keys(near, mask, far.view(*chosen.shape, -1), None if pool.is_full else chosen >= 0)

    def _shared_entries(self, pool: Pool, chosen: Tensor, sequence: int) -> tuple[Tensor, Tensor] | None:
        """All entries [1, E, D] up to the last that rows [1, n, k] of one sequence chose, and bool [1, n, E]: which.

        While E is small, one product with masked weights, exact zeros, costs less than gathering each row's choice.
        None when E is large.
        """
        count = int(chosen.max()) + 1
        if count > SHARED_ENTRIES_MAX * chosen.shape[-1]:
            return None
        assert pool.bases is not None, "only a pool of all entries can be shared"
        base = int(pool.bases[sequence])
        mask = torch.zeros(*chosen.shape[:2], count + 1, dtype=torch.bool, device=chosen.device)
        mask.scatter_(2, torch.where(chosen < 0, count, chosen), True)
        return pool.values[base : base + count].unsqueeze(0), mask[..., :count]


def tile_sizes(config: ModelConfig, tokens: int) -> TileSizes:
    """Tile bounds for sequences of up to `tokens` tokens: a row's queries, entries and index scores."""
    text = config.text
    entries = min(text.index_topk, tokens)
    # Scores exist as product, rounded product and weighted product at once.
    row = (text.num_attention_heads * 2 + entries) * text.head_dim + 3 * text.index_n_heads * tokens
    return TileSizes(TILE_NUMBERS_MAX, row, config.window * text.head_dim)
