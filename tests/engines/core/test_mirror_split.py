"""Every row has one owner, ranks have equal causal work, and any rows asked for come back in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.core.mirror import MirrorSplit, Span, rank_spans

LENS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
RANKS = st.integers(1, 5)


def naive(lens: list[int], rank: int, ranks: int) -> list[int]:
    """A rank's rows, by cutting each sequence's list of rows into parts."""
    found, first = [], 0
    for count in lens:
        rows, part = list(range(first, first + count)), -(-count // (2 * ranks))
        parts = [rows[i * part : (i + 1) * part] for i in range(2 * ranks)]
        found += parts[rank] + parts[2 * ranks - 1 - rank]
        first += count
    return found


@given(LENS, RANKS)
def test_ranks_have_their_parts_and_nobody_anothers(lens: list[int], ranks: int) -> None:
    split = MirrorSplit.of(lens, ranks)
    for rank in range(ranks):
        own = naive(lens, rank, ranks)
        assert split.rows[rank].tolist() == (own or [0])
        assert np.flatnonzero(split.owners == rank).tolist() == own
        assert split.rows[rank][split.places[own]].tolist() == own
        spans = rank_spans(lens, rank, ranks)
        assert all(span.rows > 0 for span in spans)
        assert len(set(spans)) == len(spans) <= 2 * len(lens)


@given(LENS, RANKS, st.data())
def test_rows_asked_for_arrive_in_order(lens: list[int], ranks: int, data: st.DataObject) -> None:
    split, total = MirrorSplit.of(lens, ranks), sum(lens)
    wanted = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True)), np.int64)
    values = np.arange(total) * 7 + 3
    travel = split.exchange(wanted)
    arrived = np.full(ranks * travel.width, -1)
    for rank in range(ranks):
        own = values[split.rows[rank]]
        arrived[rank * travel.width :][: len(travel.sent[rank])] = own[travel.sent[rank]]
    assert arrived[travel.places].tolist() == values[wanted].tolist()
    assert sum(len(rows) for rows in travel.sent) == len(wanted), "only what was asked for travels, and once"
    assert travel.width == max(len(rows) for rows in travel.sent)


@given(st.integers(1, 10), RANKS, st.integers(0, 1000))
def test_whole_parts_cost_every_rank_the_same(part: int, ranks: int, start: int) -> None:
    split = MirrorSplit.of([part * 2 * ranks], ranks)
    assert len({int((start + rows + 1).sum()) for rows in split.rows}) == 1


@pytest.mark.parametrize(
    ("lens", "spans"),
    [
        ([8], [[Span(0, 0, 2), Span(0, 6, 2)], [Span(0, 2, 4)]]),
        ([7, 3], [[Span(0, 0, 2), Span(0, 6, 1), Span(1, 0, 1)], [Span(0, 2, 4), Span(1, 1, 2)]]),
        ([1], [[Span(0, 0, 1)], [Span(0, 0, 1)]]),
    ],
)
def test_two_ranks(lens: list[int], spans: list[list[Span]]) -> None:
    """Parts 1 and 2 of rank 1 touch; short chunks lack their last parts; a rank without rows repeats the first."""
    assert [list(rank_spans(lens, rank, 2)) for rank in range(2)] == spans


@given(LENS)
def test_one_rank_has_whole_sequences(lens: list[int]) -> None:
    assert rank_spans(lens, 0, 1) == tuple(Span(i, 0, rows) for i, rows in enumerate(lens))
