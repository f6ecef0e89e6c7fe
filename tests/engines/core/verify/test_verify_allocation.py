"""The greedy and its split against a loop written from the rules, and what must hold for any rates and curve."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.verify.allocation import allocate, choose_total, split_places
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.rates import NO_DRAFT
from shoal.engines.core.verify.redistribution import redistribute
from shoal.engines.core.verify.sizes import first_size, graph_sizes

EIGHTHS = st.integers(0, 8).map(lambda eighths: eighths / 8)  # sums of few of them are exact, and ties are common


@st.composite
def rate_rows(draw, count, drafts):
    """Rates [count, drafts] that never rise within a row, each row holding all drafts or none."""
    rows = []
    for _ in range(count):
        holds = draw(st.booleans()) or draw(st.booleans())
        values = sorted(draw(st.lists(EIGHTHS, min_size=drafts, max_size=drafts)), reverse=True)
        rows.append(values if holds else [NO_DRAFT] * drafts)
    return np.array(rows, np.float64).reshape(count, drafts)


@st.composite
def cases(draw):
    count, drafts = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    sizes = graph_sizes(draw(st.integers(count, count * (1 + drafts))), draw(st.sampled_from([1, 2, 8])))
    ms = draw(st.lists(st.integers(8, 64).map(float), min_size=len(sizes), max_size=len(sizes)))
    size_rates = draw(rate_rows(count, drafts))
    split_rates = np.where(size_rates < 0, NO_DRAFT, np.maximum(draw(rate_rows(count, drafts)), 0.0))
    corrections = draw(st.sampled_from([(0.0, 0.0), (0.25, 2.0)]))
    return size_rates, split_rates, StepCurve(sizes, tuple(ms)), corrections


def naive_queue(rates):
    entries = [(-rate, at) for at, row in enumerate(rates.tolist()) for rate in row if rate >= 0]
    return [(at, -negative) for negative, at in sorted(entries)]


def naive_allocate(size_rates, split_rates, curve, slope_ms, sampler_ms):
    """Engine runtime notes 7.4, step by step."""
    count = len(size_rates)
    best, best_throughput = 0, 0.0
    tokens = float(count)
    for taken, rate in enumerate([0.0, *[rate for _, rate in naive_queue(size_rates)]]):
        tokens += rate
        size = curve.size_of(count + taken)
        if size is None:
            continue
        throughput = tokens / (curve.time_ms(size) + slope_ms * size + sampler_ms)
        if throughput > best_throughput:
            best, best_throughput = count + taken, throughput
    rows = [1] * count
    for at, _ in naive_queue(split_rates)[: best - count]:
        rows[at] += 1
    return rows


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_vectorised_greedy_is_the_naive_one(case):
    size_rates, split_rates, curve, (slope_ms, sampler_ms) = case
    got = allocate(size_rates, split_rates, curve.times_ms(slope_ms, sampler_ms))
    assert got.rows.tolist() == naive_allocate(size_rates, split_rates, curve, slope_ms, sampler_ms)
    assert got.rows.sum() == got.total.rows
    held = (split_rates >= 0).sum(axis=1)
    assert all(1 <= rows <= 1 + drafts for rows, drafts in zip(got.rows, held, strict=True))


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_a_split_takes_prefixes_of_the_best_rates(case, data):
    """Nothing taken is worth less than anything left, and a sequence's places are its first drafts."""
    _, rates, _, _ = case
    places = data.draw(st.integers(0, int((rates >= 0).sum())))
    counts = split_places(rates, places)
    assert counts.sum() == places
    taken = [rate for row, count in zip(rates, counts, strict=True) for rate in row[:count]]
    left = [rate for row, count in zip(rates, counts, strict=True) for rate in row[count:]]
    assert not taken or not left or min(taken) >= max(left)
    assert min(taken, default=0.0) >= 0


def naive_redistribute(confidences, remap, total_rows):
    """Engine runtime notes 7.6: rank every entry by counting those before it."""
    drafts = confidences.shape[1]
    rates = []
    for at in remap:
        product = np.float32(1)
        for j in range(drafts):
            product = np.float32(product * confidences[at][j]) if at >= 0 else np.float32(0)
            rates.append(product)
    ranks = [
        sum(other > mine or (other == mine and j < i) for j, other in enumerate(rates)) for i, mine in enumerate(rates)
    ]
    spare = total_rows - len(remap)
    return [1 + sum(rank < spare for rank in ranks[i * drafts : (i + 1) * drafts]) for i in range(len(remap))]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_redistribution_is_the_count_of_ranks(data):
    previous, drafts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    values = st.one_of(EIGHTHS, st.floats(0, 1, width=32))
    row = st.lists(values, min_size=drafts, max_size=drafts)
    confidences = np.array(data.draw(st.lists(row, min_size=previous, max_size=previous)), np.float32)
    kept = data.draw(st.lists(st.integers(0, previous - 1), unique=True))
    remap = np.array(data.draw(st.permutations([*kept, *[-1] * data.draw(st.integers(0 if kept else 1, 3))])))
    total = data.draw(st.integers(len(remap), len(remap) * (1 + drafts)))
    rows = redistribute(confidences, remap, total)
    assert rows.tolist() == naive_redistribute(confidences, remap, total)
    assert rows.sum() == total


def test_a_total_that_cannot_be_given_out_is_refused():
    confidences = np.full((1, 2), 0.5, np.float32)
    for total in (1, 7):
        with pytest.raises(ValueError, match=f"total_rows = {total} for 2 sequences of 2 drafts"):
            redistribute(confidences, np.array([0, -1]), total)


def test_more_sequences_than_the_curve_has_rows_are_refused():
    curve = StepCurve((1, 2), (1.0, 1.5))
    with pytest.raises(ValueError, match="3 sequences in a step: the curve covers 1 to 2 rows"):
        choose_total(np.zeros((3, 1)), curve.times_ms(0.0, 0.0))


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 200))
def test_a_size_is_the_smallest_that_holds_the_rows(rows_max, step, rows):
    sizes = graph_sizes(rows_max, step)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == rows_max
    size = first_size(sizes, rows)
    assert (size is None) == (rows > rows_max)
    if size is not None:
        assert size == min(one for one in sizes if one >= rows)


@pytest.mark.parametrize(
    ("sizes", "ms", "message"),
    [
        ((), (), "0 sizes and 0 times"),
        ((1, 2), (1.0,), "2 sizes and 1 times"),
        ((2, 2), (1.0, 1.0), "must increase"),
        ((0, 2), (1.0, 1.0), "from at least 1"),
        ((1, 2), (1.0, 0.0), "finite and above 0"),
        ((1, 2), (1.0, float("nan")), "finite and above 0"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(sizes, ms, message):
    with pytest.raises(ValueError, match=message):
        StepCurve(sizes, ms)


@given(st.lists(st.integers(8, 64).map(float), min_size=1, max_size=6), st.integers(1, 30))
def test_a_curve_of_every_row_rises_and_is_the_nearest_that_does(ms, rows_max):
    """At the measured sizes: greatest lower mean of what comes before, least upper mean of what comes behind."""
    sizes = graph_sizes(rows_max, rows_max)[: len(ms)]
    ms = ms[: len(sizes)]
    whole = StepCurve(sizes, tuple(ms)).of_every_row()
    assert whole.sizes == tuple(range(1, sizes[-1] + 1))
    assert all(one <= other + 1e-9 for one, other in itertools.pairwise(whole.ms))
    for i, size in enumerate(sizes):
        nearest = max(min(np.mean(ms[j : k + 1]) for k in range(i, len(ms))) for j in range(i + 1))
        assert whole.time_ms(size) == pytest.approx(nearest)
