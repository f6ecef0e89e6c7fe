"""Plans of moves: nothing is lost, nothing is sent twice, and both sides of every transfer agree."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.experts.moves import Copy, MovePlan, Transfer, plan_moves, serving_sender
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.policy import solve
from shoal.engines.core.experts.traffic import TrafficShape, windows


@st.composite
def pairs(draw):
    """Two placements of one shape; twins are allowed, as the published policy makes them."""
    ranks, experts, layers = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 2))
    extra = -experts % ranks + ranks * draw(st.integers(0, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def one() -> Placement:
        rows = []
        for _ in range(layers):
            row = np.concatenate((np.arange(experts), random.integers(0, experts, extra)))
            rows.append(random.permutation(row))
        return Placement.of(np.array(rows), ranks, experts)

    return one(), one()


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_a_plan_turns_the_old_placement_into_the_new_one(pair):
    old, new = pair
    plan_moves(old, new).check(old, new)


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_both_sides_compute_the_same_moves(pair):
    """Each rank computes a plan of its own; what a sends to b is what b expects from a, in the same order."""
    old, new = pair
    plans = [plan_moves(old, new) for _ in range(old.ranks)]
    for a in range(old.ranks):
        for b in range(old.ranks):
            sent = [t for t in plans[a].sends(a) if t.receiver == b]
            expected = [t for t in plans[b].receives(b) if t.sender == a]
            assert sent == expected
    assert len(plans[0].transfers) == sum(len(plans[r].receives(r)) for r in range(old.ranks))


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_layers_can_be_planned_one_at_a_time(pair):
    old, new = pair
    whole = plan_moves(old, new)
    parts = [plan_moves(old, new, (layer,)) for layer in range(old.layers)]
    assert whole.transfers == tuple(t for part in parts for t in part.transfers)
    assert whole.copies == tuple(c for part in parts for c in part.copies)


def test_equal_placements_move_nothing():
    start = Placement.start(2, 6, 2, 4)
    assert plan_moves(start, start) == MovePlan((), ())


def test_local_and_received_experts():
    """Rank 1 holds expert 3 and gets another copy of it locally; expert 0 comes once and is copied on."""
    old = Placement.of(np.array([[0, 1, 2, 3, 4, 5]]), 2, 6)
    new = Placement.of(np.array([[0, 1, 2, 3, 3, 3]]), 2, 6)
    assert plan_moves(old, new).transfers == ()
    assert plan_moves(old, new).copies == (Copy(0, 3, 1, 3, 4, False), Copy(0, 3, 1, 3, 5, False))
    new = Placement.of(np.array([[0, 1, 2, 0, 0, 5]]), 2, 6)
    assert plan_moves(old, new).transfers == (Transfer(0, 0, 0, 0, 1, 3),)
    assert plan_moves(old, new).copies == (Copy(0, 0, 1, 3, 4, True),)


def test_senders_share_the_receivers():
    """Two senders, five receivers: two consecutive ones each, the fifth goes to the first again."""
    assert [serving_sender([4, 9], 5, j) for j in range(5)] == [4, 4, 9, 9, 4]
    assert [serving_sender([4, 9, 11], 2, j) for j in range(2)] == [4, 9]
    old = Placement.of(np.array([[0, 0, 1, 2, 3, 4, 5]]), 7, 6)
    new = Placement.of(np.array([[0, 0, 0, 0, 0, 0, 0]]), 7, 6)
    assert [(t.sender, t.receiver) for t in plan_moves(old, new).transfers] == [(0, 2), (0, 3), (1, 4), (1, 5), (0, 6)]


def test_a_wrong_plan_is_noticed():
    old = Placement.of(np.array([[0, 1, 2, 3]]), 2, 4)
    new = Placement.of(np.array([[2, 1, 0, 3]]), 2, 4)
    plan = plan_moves(old, new)
    plan.check(old, new)
    first, second = plan.transfers
    with pytest.raises(AssertionError, match="do not hold what the new placement says"):
        MovePlan((first,), ()).check(old, new)
    with pytest.raises(AssertionError, match="holds another expert"):
        MovePlan((dataclasses.replace(first, expert=3), second), ()).check(old, new)
    with pytest.raises(AssertionError, match="gets this expert twice"):
        MovePlan((first, first), ()).check(old, new)
    with pytest.raises(AssertionError, match="not the receiver's"):
        MovePlan((dataclasses.replace(first, receiver=first.sender), second), ()).check(old, new)
    with pytest.raises(AssertionError, match="nothing arrives"):
        MovePlan((), (Copy(0, 1, 1, 2, 3, True),)).check(old, new)


def test_shapes_must_match():
    with pytest.raises(ValueError, match="differ in shape"):
        plan_moves(Placement.start(1, 4, 0, 2), Placement.start(1, 4, 0, 4))


def test_a_real_rearrangement_checks_out():
    shape = TrafficShape(layers=4, experts=48, choices=4_000, drift=0.3, topics=4)
    stream = windows(shape, 50, seed=1)
    placement = Placement.start(4, 48, 8, 8)
    for _ in range(3):
        after = solve(next(stream), placement)
        plan = plan_moves(placement, after)
        plan.check(placement, after)
        assert plan.transfers
        placement = after
