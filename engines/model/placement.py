"""Index arithmetic of one cached step: which rows go to which ring rows and entries, and what each query row sees."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences' rows in one step, all int64 [S] but `tables` [S, blocks]; rows lie end to end from `offsets`.

    `lower`: decoder layers see no key before this position (0: no truncation).
    """

    starts: Tensor
    lens: Tensor
    slots: Tensor
    tables: Tensor
    lower: Tensor

    @property
    def offsets(self) -> Tensor:
        """First row of each sequence."""
        return torch.cumsum(self.lens, 0) - self.lens

    @property
    def ends(self) -> Tensor:
        """Position after each sequence's last row."""
        return self.starts + self.lens

    def of_rows(self) -> Tensor:
        """The sequence of every row, int64 [T]."""
        return torch.repeat_interleave(torch.arange(len(self.lens), device=self.lens.device), self.lens)

    def positions(self) -> Tensor:
        """The absolute position of every row, int64 [T]."""
        return counted(self.starts, self.lens)

    def from_position(self, first: Tensor) -> tuple["Sequences", Tensor]:
        """The rows at or after `first` [S], at least each sequence's last row, and their indices int64 [kept]."""
        clipped = torch.minimum((first - self.starts).clamp_min(0), self.lens - 1)
        kept = counted(self.offsets + clipped, self.lens - clipped)
        return Sequences(self.starts + clipped, self.lens - clipped, self.slots, self.tables, self.lower), kept


@dataclass(frozen=True, slots=True)
class Spans:
    """The rows that this rank computes, n of them in P runs end to end, all int64 [P]: run i is `lens[i]` rows of
    sequence `sequences[i]`, from its row `firsts[i]` on. `is_whole`: they are all rows of all sequences, in order.
    """

    sequences: Tensor
    firsts: Tensor
    lens: Tensor
    is_whole: bool

    @classmethod
    def whole(cls, lens: Tensor) -> "Spans":
        """All rows of sequences of `lens` int64 [S]."""
        return cls(torch.arange(len(lens), device=lens.device), torch.zeros_like(lens), lens, is_whole=True)


@dataclass(frozen=True, slots=True)
class Tile:
    """B runs x n rows that attend in one go.

    sequences int64 [B]; rows int64 [B, n] among this rank's; keys int64 [B, K] into a pool of history then all new
    rows; mask bool [B, n, K], `sees_all` if it is true everywhere. `is_whole`: the tile is all sequences and all rows
    in order (as in decode), so that nothing needs gathering.
    """

    sequences: Tensor
    rows: Tensor
    keys: Tensor
    mask: Tensor
    sees_all: bool
    is_whole: bool

    def take(self, values: Tensor) -> Tensor:
        """The tile's part [B, n, ...] of values of this rank's rows."""
        return values.view(*self.rows.shape, *values.shape[1:]) if self.is_whole else values[self.rows]

    def of_sequences(self, values: Tensor) -> Tensor:
        """The tile's part [B, ...] of values of all sequences [S, ...]."""
        return values if self.is_whole else values[self.sequences]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Sliding windows of one step, the same for all layers of one kind.

    The key pool is `history` rows [S * (window - 1)] read from ring rows (where valid), then the step's T rows.
    `history_valid` None: all are valid. Written are the last ring-length rows of each sequence, at (slot, ring row).
    `reads_own`: the step's rows fit into the ring behind their history, so they are written first and `history`
    includes them (as in decode).
    """

    history_rows: Tensor
    history_valid: Tensor | None
    written: Tensor
    written_slots: Tensor
    written_rows: Tensor
    reads_own: bool
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Entries that one step completes in caches of one ratio, E of them.

    members int64 [E, ratio] into a pool of `ratio - 1` history rows a sequence, then the step's rows; first int64 [E]
    is the position of each entry's first token; blocks, rows int64 [E] are its place.
    """

    members: Tensor
    first: Tensor
    blocks: Tensor
    rows: Tensor


def counted(first: Tensor, counts: Tensor) -> Tensor:
    """first[0], first[0]+1, … counts[0] of them, then the same for the next; int64 [sum of counts]."""
    ends = torch.cumsum(counts, 0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total, device=first.device) + torch.repeat_interleave(first - (ends - counts), counts)


def window_plan(
    sequences: Sequences,
    spans: Spans,
    lower: Tensor,
    write_lower: Tensor,
    window: int,
    ring_tokens: int,
    sizes: "TileSizes",
) -> WindowPlan:
    """Windows of `window` keys, none before `lower` [S]; rows before `write_lower` [S] are not written.

    Tiles are of the rows in `spans`; written are rows of everybody.
    """
    device = sequences.starts.device
    of_rows, positions = sequences.of_rows(), sequences.positions()
    is_written = (sequences.ends[of_rows] - positions <= ring_tokens) & (positions >= write_lower[of_rows])
    written = is_written.nonzero().squeeze(1)
    tiles, pieces = [], tile_rows(spans.lens.tolist(), sizes)
    history_count = len(sequences.lens) * (window - 1)
    span_offsets = torch.cumsum(spans.lens, 0) - spans.lens
    for members, first, count in pieces:
        runs = torch.tensor(members, dtype=torch.int64, device=device)
        ids, within = spans.sequences[runs], first + torch.arange(count, device=device)
        rows = span_offsets[runs].unsqueeze(1) + within
        at = (sequences.starts[ids] + spans.firsts[runs]).unsqueeze(1) + within
        key_at = at[:, :1] + torch.arange(1 - window, count, device=device)
        past = key_at - sequences.starts[ids].unsqueeze(1)
        keys = torch.where(
            past < 0,
            ids.unsqueeze(1) * (window - 1) + past + window - 1,
            history_count + sequences.offsets[ids].unsqueeze(1) + past,
        )
        key_at, at = key_at.unsqueeze(1), at.unsqueeze(2)
        earliest = lower[ids].clamp_min(0)[:, None, None]
        mask = (key_at <= at) & (key_at > at - window) & (key_at >= earliest)
        tiles.append(Tile(ids, rows, keys, mask, bool(mask.all()), is_whole=spans.is_whole and len(pieces) == 1))
    longest = pieces[0][2]
    reads_own = tiles[0].is_whole and len(written) == len(positions) and window - 1 + longest <= ring_tokens
    last = longest if reads_own else 0
    history = sequences.starts.unsqueeze(1) + torch.arange(1 - window, last, device=device)
    valid = history >= lower.clamp_min(0).unsqueeze(1)
    return WindowPlan(
        history_rows=history % ring_tokens,
        history_valid=None if bool(valid.all()) else valid,
        written=written,
        written_slots=sequences.slots[of_rows[written]],
        written_rows=positions[written] % ring_tokens,
        reads_own=reads_own,
        tiles=tuple(tiles),
    )


def in_order(tiles: Sequence[Tile], parts: Sequence[Tensor]) -> Tensor:
    """Values of this rank's rows [n, ...] out of each tile's [B * n, ...]."""
    if tiles[0].is_whole:
        return parts[0]
    values = torch.cat(list(parts))
    return torch.empty_like(values).index_copy_(0, torch.cat([tile.rows.flatten() for tile in tiles]), values)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """What a tile may hold: `numbers_max` values, of which a row takes `row` and a sequence's window `window`."""

    numbers_max: int
    row: int
    window: int


def tile_rows(lens: Sequence[int], sizes: TileSizes) -> list[tuple[tuple[int, ...], int, int]]:
    """(sequences, first row in each, rows of each) of tiles that cover all rows; equal lengths share tiles."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for sequence, length in enumerate(lens):
        by_length[length].append(sequence)
    rows_max = max(1, sizes.numbers_max // sizes.row)
    tiles: list[tuple[tuple[int, ...], int, int]] = []
    for length, members in by_length.items():
        if length > rows_max:
            tiles += [((m,), f, min(rows_max, length - f)) for m in members for f in range(0, length, rows_max)]
            continue
        together = max(1, sizes.numbers_max // (length * sizes.row + sizes.window))
        tiles += [(tuple(members[i : i + together]), 0, length) for i in range(0, len(members), together)]
    return tiles


def entry_plan(sequences: Sequences, ratio: int, block_tokens: int) -> EntryPlan:
    """The entries of `ratio` tokens that the step's rows complete."""
    first_entry = sequences.starts // ratio
    counts = sequences.ends // ratio - first_entry
    ids = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = counted(first_entry, counts) * ratio
    past = first.unsqueeze(1) + torch.arange(ratio, device=counts.device) - sequences.starts[ids].unsqueeze(1)
    history = len(counts) * (ratio - 1)
    members = torch.where(
        past < 0,
        ids.unsqueeze(1) * (ratio - 1) + past + ratio - 1,
        history + sequences.offsets[ids].unsqueeze(1) + past,
    )
    blocks = sequences.tables[ids, first // block_tokens]
    return EntryPlan(members, first, blocks, first % block_tokens // ratio)
