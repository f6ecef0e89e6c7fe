"""Which rows of a step each context-parallel rank computes, and how rows find their order again after an exchange.

Causal attention costs a row as much as its position, so a chunk is cut into 2 * ranks equal parts and rank i computes
parts i and 2 * ranks - 1 - i (engine runtime notes 10.8): early and late rows together cost every rank the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Span(NamedTuple):
    """`rows` rows of a sequence's chunk, from its row `first` on."""

    sequence: int
    first: int
    rows: int


class Exchange(NamedTuple):
    """How some rows, W of them, reach every rank: rank r sends its own rows `sent[r]`, padded to `width` rows.

    What arrives is [ranks * width] rows, in which `places` int64 [W] finds the rows in the order they were asked for.
    """

    sent: tuple[Ints, ...]
    width: int
    places: Ints


@dataclass(frozen=True, slots=True)
class MirrorSplit:
    """The rows of all ranks. Of the T rows of a step, `owners` int64 [T] names the rank that computes each.

    `places` int64 [T] is where each row lies among its owner's rows, `rows` those of each rank, as indices into the T.
    """

    owners: Ints
    places: Ints
    rows: tuple[Ints, ...]

    @classmethod
    def of(cls, lens: Sequence[int], ranks: int) -> "MirrorSplit":
        """The split of sequences of `lens` rows that lie end to end."""
        offsets = np.cumsum([0, *lens])
        rows = tuple(span_rows(rank_spans(lens, rank, ranks), offsets) for rank in range(ranks))
        owners, places = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
        # In descending order, so that a placeholder, always row 0, is overwritten by its owner, rank 0.
        for rank in reversed(range(ranks)):
            owners[rows[rank]], places[rows[rank]] = rank, np.arange(len(rows[rank]))
        return cls(owners, places, rows)

    def exchange(self, wanted: Ints) -> Exchange:
        """How rows `wanted` int64 [W] reach everybody: only they travel, and each only from its owner."""
        sent, arrival = [], np.empty(len(wanted), np.int64)
        for rank in range(len(self.rows)):
            mine = np.flatnonzero(self.owners[wanted] == rank)
            arrival[mine] = np.arange(len(mine))
            sent.append(self.places[wanted[mine]])
        width = max(len(rows) for rows in sent)
        return Exchange(tuple(sent), width, self.owners[wanted] * width + arrival)


def rank_spans(lens: Sequence[int], rank: int, ranks: int) -> tuple[Span, ...]:
    """Rank's parts of every sequence's chunk, in order; parts that touch are one span.

    Parts are ceil(rows / (2 * ranks)) long, so the last ones may be short or missing. A rank that would have no row
    at all gets row 0 as a placeholder, which it does not own: layers and their collectives need a row.
    """
    spans: list[Span] = []
    for sequence, rows in enumerate(lens):
        part = -(-rows // (2 * ranks))
        for index in (rank, 2 * ranks - 1 - rank):
            first, end = min(index * part, rows), min((index + 1) * part, rows)
            if spans and spans[-1].sequence == sequence and spans[-1].first + spans[-1].rows == first:
                spans[-1] = Span(sequence, spans[-1].first, end - spans[-1].first)
            elif first < end:
                spans.append(Span(sequence, first, end - first))
    return tuple(spans) or (Span(0, 0, 1),)


def span_rows(spans: Sequence[Span], offsets: Ints) -> Ints:
    """Indices int64 [n] of the rows of spans, where sequence i's rows begin at offsets[i]."""
    return np.concatenate([offsets[s.sequence] + s.first + np.arange(s.rows) for s in spans])
