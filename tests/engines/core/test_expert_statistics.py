"""When experts are rearranged and what is known then: times, windows of loads, and the balance of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.experts.placement import Placement, replica_index
from shoal.engines.core.experts.statistics import BalanceMeter, LoadWindow, expert_counts, rank_counts, rank_loads
from shoal.engines.core.experts.timing import Counting, Tick, Timing, TimingConfig
from shoal.engines.core.experts.traffic import TrafficShape, windows


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 90))
@settings(deadline=None)
def test_a_window_holds_the_last_steps_in_order(window, buckets, steps):
    kept = LoadWindow(window, 1, 2, buckets)
    for step in range(steps):
        kept.add(np.array([[1, step]]))
    loads = kept.loads()
    assert len(loads) <= min(buckets, window)
    covered = int(loads[:, 0, 0].sum())
    bucket = -(-window // min(buckets, window))
    rounded = -(-window // bucket) * bucket
    assert min(steps, rounded - bucket + 1) <= covered <= min(steps, rounded)
    flat = list(range(steps - covered, steps))
    assert loads[:, 0, 1].sum() == sum(flat), "the steps kept are the last ones"
    firsts = np.cumsum(loads[:, 0, 0]) - loads[:, 0, 0]
    for count, first, total in zip(loads[:, 0, 0], firsts, loads[:, 0, 1], strict=True):
        assert total == sum(flat[first : first + count])
    kept.clear()
    assert len(kept.loads()) == 0


def test_counts_of_places_become_counts_of_experts_and_ranks():
    placement = Placement.of(np.array([[0, 1, 2, 0], [2, 1, 0, 1]]), 2, 3)
    received = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    assert expert_counts(placement, received).tolist() == [[13, 6, 7], [3, 6, 1]]
    assert rank_counts(received, 2).tolist() == [[11, 15], [3, 7]]


def test_expected_rank_loads_are_what_the_gate_does():
    """Tokens sent one by one to the replica the gate would choose, against the even split that policies assume."""
    random = np.random.default_rng(4)
    placement = Placement.start(1, 6, 3, 3)
    chosen = random.integers(0, 6, 3_000)
    counts = placement.counts[0][chosen]
    places = placement.places[0][chosen, replica_index(1, np.arange(3_000), counts)]
    received = np.bincount(places, minlength=9)[None]
    expected = rank_loads(placement, np.bincount(chosen, minlength=6)[None, None])
    assert np.abs(rank_counts(received, 3) - expected[0]).max() < 60


def test_moe_lb_without_data_and_after_reset():
    meter = BalanceMeter()
    assert meter.moe_lb == 1.0
    meter.add(np.array([[[3, 1]], [[1, 1]]]))
    meter.add(np.array([2, 0]))
    assert meter.moe_lb == (3 + 1 + 2) / (2 + 1 + 1)
    meter.reset()
    assert meter.moe_lb == 1.0


def test_the_first_rearrangement_comes_after_a_quarter_interval():
    timing = Timing(TimingConfig(10, 100), ranks=2)
    at = [step for step in range(250) if timing.step(is_prefill=False).rearranges]
    assert at == [24, 124, 224]


def test_one_rank_and_interval_zero_do_nothing():
    for timing in (Timing(TimingConfig(1, 1), ranks=1), Timing(TimingConfig(1, 0), ranks=8)):
        assert {timing.step(is_prefill=False) for _ in range(5)} == {Tick(False, False)}


def test_prefill_of_a_normal_engine():
    """Not recorded; or recorded, and the next decode step rearranges."""
    plain = Timing(TimingConfig(2, 8), ranks=2)
    assert plain.step(is_prefill=True) == Tick(True, False)
    decode = Timing(TimingConfig(2, 8, Counting.DECODE), ranks=2)
    assert decode.step(is_prefill=True) == Tick(False, False)
    after = Timing(TimingConfig(2, 8, Counting.AFTER_PREFILL), ranks=2)
    assert [after.step(is_prefill=one) for one in (True, True, False, False)] == [
        Tick(True, False), Tick(True, False), Tick(True, True), Tick(True, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("window", "interval"), [(0, 5), (6, 5), (-1, 5)])
def test_a_window_must_fit_its_interval(window, interval):
    with pytest.raises(ValueError, match=f"window = {window} must be between 1 and interval = 5; use a shorter"):
        TimingConfig(window, interval)
    with pytest.raises(ValueError, match="must not be negative"):
        TimingConfig(1, -1)


def test_traffic_is_reproducible_and_shaped():
    shape = TrafficShape(layers=2, experts=64, choices=10_000, zipf=1.0, topic_spread=0.1)
    one, other, third = (next(windows(shape, 30, seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, other)
    assert not np.array_equal(one, third)
    assert abs(one.sum(2).mean() / 10_000 - 1) < 0.01
    ranked = np.sort(one.sum(0), axis=1)[:, ::-1]
    assert (ranked[:, 0] > 5 * ranked[:, 15]).all()


def test_traffic_drifts_from_window_to_window():
    def moved(drift: float) -> float:
        shape = TrafficShape(2, 64, 1_000_000, topics=1, topic_swing=0.0, drift=drift)
        first, _, _, last = (w for w, _ in zip(windows(shape, 10, seed=1), range(4), strict=False))
        return float(np.log(last.sum(0) / first.sum(0)).std())

    assert moved(0.0) < 0.02
    assert 0.2 < moved(0.2) < 0.6
