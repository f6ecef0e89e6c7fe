"""Placements of experts: valid always, no worse than what was there, hardly ever worse than a naive opponent."""

import numpy as np
import pytest
from expert_opponents import naive, peaks, published_layer
from hypothesis import event, given, settings
from hypothesis import strategies as st
from shoal.engines.core.experts.placement import Placement, extra_places, replica_index
from shoal.engines.core.experts.policy import BUCKETS, SLOTS_MAX, Effort, deal, in_buckets, solve
from shoal.engines.core.experts.published import solve_published
from shoal.engines.core.experts.replicate import replicas, with_replicas
from shoal.engines.core.experts.traffic import TrafficShape, windows

SMALL = TrafficShape(layers=3, experts=48, choices=4_000, topics=4, topic_steps=20)


@st.composite
def cases(draw):
    """(loads [steps, layers, experts], ranks, extra) of any shape for which a placement exists."""
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    fitting = [x for x in range(experts * (ranks - 1) + 1) if (experts + x) % ranks == 0]
    if not fitting:  # fewer experts than one place a rank can be filled with
        ranks, fitting = 1, [0]
    extra = draw(st.sampled_from(fitting[:4] + fitting[-1:]))
    steps, layers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    seed, most = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1, 3, 50, 10_000]))
    random = np.random.default_rng(seed)
    loads = random.integers(0, most, (steps, layers, experts))
    if draw(st.booleans()):
        loads *= random.pareto(1.0, loads.shape).astype(np.int64).clip(0, 1_000)
    return loads, ranks, extra


@given(cases())
@settings(max_examples=300, deadline=None)
def test_every_expert_is_placed_and_no_rank_holds_one_twice(case):
    loads, ranks, extra = case
    start = Placement.start(*loads.shape[1:], extra, ranks)
    start.check()
    solved = solve(loads, start)
    solved.check()
    assert solved.ranks == ranks
    assert solved.experts.shape == (loads.shape[1], loads.shape[2] + extra)
    assert (peaks(solved, loads) <= peaks(start, loads) * (1 + 1e-5)).all()
    again = solve(loads, solved)
    assert (peaks(again, loads) <= peaks(solved, loads) * (1 + 1e-5)).all()


@given(st.integers(2, 8), st.integers(8, 40), st.integers(0, 2), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_ours_is_never_worse_than_naive(ranks, experts, more, seed):
    """On any traffic, over a few layers. (A handful of tokens can be set up so that other replicas were luckier.)"""
    extra = -experts % ranks + more * ranks
    loads = next(windows(TrafficShape(4, experts, 50 * experts, topics=3, topic_steps=10), 20, seed))
    ours = peaks(solve(loads, Placement.start(4, experts, extra, ranks)), loads)
    opponent = naive(loads, ranks, extra)
    event("naive runs into a corner" if opponent is None else "compared")
    if opponent is not None:
        opponent.check()
        assert ours.sum() <= peaks(opponent, loads).sum() * 1.001


@given(st.integers(1, 4), st.integers(2, 8), st.integers(0, 2), st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_the_published_policy_follows_its_rules(ranks, experts, more, steps, seed):
    """Loads are large and random, so that no choice hangs on the last bit of a sum."""
    extra = -experts % ranks + more * ranks
    loads = np.random.default_rng(seed).integers(0, 10**9, (steps, 2, experts))
    placement = solve_published(loads, ranks, extra)
    placement.check(allows_twins=True)
    for layer in range(2):
        places, counts = published_layer(loads[:, layer].tolist(), ranks, extra)
        assert placement.counts[layer].tolist() == counts
        # Replicas of one expert weigh the same, so only their order may differ: the experts of places do not.
        assert placement.experts[layer].tolist() == places


def test_over_many_layers_ours_beats_naive_published_and_start():
    window = next(windows(TrafficShape(layers=20, experts=24, choices=4_000, topics=4, topic_steps=20), 100, seed=3))
    start = Placement.start(20, 24, 8, 8)
    ours = peaks(solve(window, start), in_buckets(window))
    opponents = {"naive": naive(window, 8, 8), "published": solve_published(in_buckets(window), 8, 8), "start": start}
    for name, opponent in opponents.items():
        assert opponent is not None, name
        theirs = peaks(opponent, in_buckets(window))
        assert ours.sum() < theirs.sum() * (0.999 if name != "start" else 0.7), name


def test_the_next_window_profits():
    """Solved on one window, measured on the one after it, with chance and drift in between."""
    first, second = (window for window, _ in zip(windows(SMALL, 100, seed=5), range(2), strict=False))
    start = Placement.start(3, 48, 8, 8)
    solved = solve(first, start)
    mean = second.sum((0, 2)) / 8
    assert (peaks(start, second) > 1.15 * mean).all()
    assert (peaks(solved, second) < 1.08 * mean).all()


def test_topics_count_not_only_totals():
    """Two experts never busy together share a rank; totals alone cannot tell them from two that always are."""
    day, night = [30, 30, 0, 0], [0, 0, 30, 30]
    loads = np.array([[day], [night]] * 4)
    solved = solve(loads, Placement.start(1, 4, 0, 2))
    assert sorted(sorted(rank) for rank in solved.by_rank()[0].tolist()) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])


def test_where_the_naive_opponent_fails():
    """Heaviest first leaves a rank whose last place may only take what it holds already; ours deals in rounds."""
    loads = np.array([[[1, 1, 4]]])
    assert naive(loads, 2, 1) is not None
    idle = np.zeros((1, 1, 3), dtype=np.int64)
    assert naive(idle, 2, 1) is None
    solve(idle, Placement.start(1, 3, 1, 2)).check()


def test_a_hot_expert_gets_at_most_one_replica_a_rank():
    loads = np.array([[[1_000_000, 1, 1, 1]]])
    solved = solve(loads, Placement.start(1, 4, 8, 3))
    assert solved.counts[0].tolist()[0] == 3
    solved.check()


def test_without_tokens_replicas_are_spread():
    solved = solve(np.zeros((4, 2, 6), dtype=np.int64), Placement.start(2, 6, 3, 3))
    solved.check()
    assert solved.counts.max() == 2


def test_what_is_not_better_stays():
    loads = np.full((4, 2, 6), 10)
    start = Placement.start(2, 6, 0, 3)
    assert np.array_equal(solve(loads, start).experts, start.experts)


def test_large_ranks_are_searched_in_parts():
    shape = TrafficShape(layers=8, experts=96, choices=20_000, topics=4, topic_swing=1.0, topic_steps=20)
    window = next(windows(shape, 50, seed=1))
    start = Placement.start(8, 96, 4, 4)
    assert start.size > SLOTS_MAX
    unsearched = solve(window, start, Effort(turns_many=0))
    searched = solve(window, start)
    searched.check()
    assert peaks(searched, in_buckets(window)).sum() < 0.99 * peaks(unsearched, in_buckets(window)).sum()


def test_dealing_keeps_replicas_apart():
    """Expert 5's three replicas straddle two rounds; the second round must avoid the ranks of the first."""
    places = np.array([[7, 6, 5, 5, 5, 4, 3, 2]], dtype=np.int32)
    weights = np.array([[9.0, 8.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0]])
    dealt = deal(places, weights, 4)
    assert all(len(set(rank)) == 2 for rank in dealt[0].tolist())


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_only_replicas_change_when_only_replicas_should(case, seed):
    """From any placement to any numbers of replicas; what fails is said, and rare."""
    loads, ranks, extra = case
    layers, experts = loads.shape[1:]
    random = np.random.default_rng(seed)
    current = solve(random.integers(0, 1_000, loads.shape), Placement.start(layers, experts, extra, ranks))
    totals = loads.sum(0) + 1.0
    counts = replicas(totals, extra, ranks)
    placed, is_done = with_replicas(current, counts, totals / counts)
    event("all layers done" if is_done.all() else "a layer has to be dealt anew")
    for layer in np.flatnonzero(is_done):
        after = Placement.of(placed[layer].reshape(1, -1), ranks, experts)
        after.check()
        assert np.array_equal(after.counts[0], counts[layer])
        if np.array_equal(counts[layer], current.counts[layer]):
            assert np.array_equal(after.experts[0], current.experts[layer])


def test_room_is_made_where_only_holders_have_some():
    """Rank 0 gives up expert 3 and holds 0 already; so 0 comes to another rank, and what was there to rank 0."""
    current = Placement.of(np.array([[0, 3, 1, 3, 2, 4]]), 3, 5)
    counts = np.array([[2, 1, 1, 1, 1]])
    placed, is_done = with_replicas(current, counts, np.array([[5.0, 1.0, 1.0, 9.0, 1.0]]))
    assert is_done.all()
    after = Placement.of(placed.reshape(1, -1), 3, 5)
    after.check()
    assert after.counts.tolist() == counts.tolist()


def test_little_drift_moves_little():
    first, second = (w for w, _ in zip(windows(SMALL, 100, seed=5), range(2), strict=False))
    before = solve(first, Placement.start(3, 48, 8, 8))
    after = solve(second, before)
    anew = solve(second, before, Effort(deal_above=0.0))
    assert (after.experts != before.experts).mean() < 0.5 < (anew.experts != before.experts).mean()
    assert peaks(after, second).sum() < 1.01 * peaks(anew, second).sum()


def test_same_loads_same_placement():
    window = next(windows(SMALL, 50, seed=9))
    start = Placement.start(3, 48, 8, 8)
    one, other = solve(window, start), solve(window.copy(), start)
    assert np.array_equal(one.experts, other.experts)
    assert np.array_equal(one.places, other.places)


def test_buckets_lose_no_token():
    window = next(windows(SMALL, 103, seed=2))
    buckets = in_buckets(window)
    assert len(buckets) == BUCKETS
    assert np.array_equal(buckets.sum(0), window.sum(0))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"experts = 10 \+ extra = 1 must be a multiple of ranks = 4; use extra = 2"):
        Placement.start(1, 10, 1, 4)
    with pytest.raises(ValueError, match="extra = 6 must be at most 4: a rank holds an expert once"):
        Placement.start(1, 4, 6, 2)
    with pytest.raises(ValueError, match=r"loads has shape \[1, 1, 5\]"):
        solve(np.ones((1, 1, 5)), Placement.start(1, 4, 0, 2))
    assert extra_places(384, 8, 64) == 64


def test_check_finds_what_is_wrong():
    good = Placement.start(1, 4, 2, 2)
    good.check()
    with pytest.raises(AssertionError, match="expert 3 has no place"):
        Placement(np.array([[0, 1, 2, 0, 1, 2]]), good.places.copy(), good.counts.copy(), 2).check()
    with pytest.raises(AssertionError, match="counts differ"):
        Placement(good.experts.copy(), good.places.copy(), np.array([[2, 1, 2, 1]]), 2).check()
    places = good.places.copy()
    places[0, 0, 0] = 1
    with pytest.raises(AssertionError, match="names a place of another"):
        Placement(good.experts.copy(), places, good.counts.copy(), 2).check()
    places = good.places.copy()
    places[0, 0, 1] = places[0, 0, 0]
    with pytest.raises(AssertionError, match="named twice"):
        Placement(good.experts.copy(), places, good.counts.copy(), 2).check()
    with pytest.raises(AssertionError, match="twins"):
        Placement.of(np.array([[0, 0, 1, 2, 3, 1]]), 2, 4).check()
    Placement.of(np.array([[0, 0, 1, 2, 3, 1]]), 2, 4).check(allows_twins=True)


def test_tokens_spread_evenly_over_replicas():
    tokens = np.arange(6_000)
    for count in (1, 2, 3, 5, 64):
        shares = np.bincount(replica_index(3, tokens, np.full(len(tokens), count)), minlength=count)
        assert shares.max() - shares.min() <= 1
    assert replica_index(5, np.array([0, 1, 10**7]), np.array([4, 4, 7])).tolist() == [1, 2, (5 + 10**7 * 23_333) % 7]
