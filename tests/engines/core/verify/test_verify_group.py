"""A group's choice against trying every size, and against ranks that choose alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.verify.allocation import choose_total
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.group import agree, offer, rank_total
from shoal.engines.core.verify.rates import NO_DRAFT
from shoal.engines.core.verify.sizes import graph_sizes

DRAFTS = 3


@st.composite
def groups(draw):
    """Rates of each rank, a curve that reaches all rows, and each rank's (slope, sampler) corrections."""
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    ranks = []
    for count in counts:
        rows = []
        for _ in range(count):
            row = sorted(draw(st.lists(st.integers(0, 8), min_size=DRAFTS, max_size=DRAFTS)), reverse=True)
            rows.append([eighths / 8 for eighths in row] if draw(st.booleans()) else [NO_DRAFT] * DRAFTS)
        ranks.append(np.array(rows, np.float64).reshape(count, DRAFTS))
    sizes = graph_sizes(5 * (1 + DRAFTS), draw(st.sampled_from([1, 4, 8])))
    rising = np.cumsum(draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))) + 8.0
    corrections = [draw(st.sampled_from([(0.0, 0.0), (0.25, 1.0)])) for _ in ranks]
    return ranks, StepCurve(sizes, tuple(rising.tolist())), corrections


def tokens_of(rates, rows):
    return len(rates) + sum(sorted(rates[rates >= 0].tolist(), reverse=True)[: rows - len(rates)])


def throughput(ranks, curve, corrections, rows):
    """Tokens a millisecond when each rank has so many rows, padded; the slowest sets the pace."""
    times = [
        curve.time_ms(max(1, count)) + slope * curve.size_of(max(1, count)) + sampler
        for count, (slope, sampler) in zip(rows, corrections, strict=True)
    ]
    return sum(tokens_of(rates, count) for rates, count in zip(ranks, rows, strict=True)) / max(times)


@settings(max_examples=200, deadline=None)
@given(groups())
def test_no_common_size_and_no_rank_alone_does_better(group):
    """On a curve that rises, capping all ranks at one size is as good as any choice of totals they make alone."""
    ranks, curve, corrections = group
    offers = [offer(rates, curve, *each) for rates, each in zip(ranks, corrections, strict=True)]
    chosen = agree(offers, curve.sizes)
    rows = [rank_total(rates, chosen.size) for rates in ranks]
    got = throughput(ranks, curve, corrections, rows)
    assert got >= chosen.tokens / chosen.time_ms - 1e-12
    for size in curve.sizes:
        if size >= max(map(len, ranks)):
            alone = [rank_total(rates, size) for rates in ranks]
            # The group counts on the time of the size, and at times no rank needs all of it.
            offered = sum(tokens_of(r, n) for r, n in zip(ranks, alone, strict=True))
            time_ms = max(curve.time_ms(size) + slope * size + sampler for slope, sampler in corrections)
            assert chosen.tokens / chosen.time_ms >= offered / time_ms - 1e-12


@settings(max_examples=100, deadline=None)
@given(groups())
def test_a_group_of_one_chooses_as_a_rank_alone(group):
    ranks, curve, corrections = group
    for rates, each in zip(ranks, corrections, strict=True):
        if len(rates):
            alone = choose_total(rates, curve.times_ms(*each))
            together = agree([offer(rates, curve, *each)], curve.sizes)
            assert together.tokens / together.time_ms == pytest.approx(alone.tokens / alone.time_ms)


@settings(max_examples=50, deadline=None)
@given(groups())
def test_offers_may_be_reduced_on_the_way(group):
    """A sum and a maximum over the network give what all offers in one place give."""
    ranks, curve, corrections = group
    offers = [offer(rates, curve, *each) for rates, each in zip(ranks, corrections, strict=True)]
    reduced = offers[0]
    for one in offers[1:]:
        reduced = type(reduced)(reduced.tokens + one.tokens, np.maximum(reduced.time_ms, one.time_ms))
    assert agree([reduced], curve.sizes).size == agree(offers, curve.sizes).size


def test_the_rank_with_most_sequences_gives_up_drafts_and_the_others_verify_all():
    """Alone the full rank would pay for its own drafts; everybody would wait for it."""
    curve = StepCurve((4, 8, 16), (10.0, 11.0, 18.0))
    full, empty = np.full((8, 1), 0.9), np.full((4, 1), 0.5)
    assert choose_total(full, curve.times_ms(0.0, 0.0)).rows == 16
    chosen = agree([offer(full, curve, 0.0, 0.0), offer(empty, curve, 0.0, 0.0)], curve.sizes)
    assert chosen.size == 8
    assert chosen.tokens == 8 + 4 + 4 * 0.5
    assert (rank_total(full, 8), rank_total(empty, 8)) == (8, 8)


def test_a_rank_without_sequences_offers_nothing_and_one_with_too_many_is_refused():
    curve = StepCurve((1, 2), (1.0, 1.5))
    nothing = np.zeros((0, DRAFTS))
    assert offer(nothing, curve, 0.0, 0.0).tokens.tolist() == [0.0, 0.0]
    assert rank_total(nothing, 2) == 0
    with pytest.raises(ValueError, match="more sequences than the largest size, 2"):
        agree([offer(np.zeros((3, DRAFTS)), curve, 0.0, 0.0)], curve.sizes)
    with pytest.raises(ValueError, match="3 sequences do not fit a step of 2 rows"):
        rank_total(np.zeros((3, DRAFTS)), 2)
