"""Plans of moves: nothing is lost, nothing is sent twice, and both sides of every transfer agree."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.experts.moves import Copy, MovePlan, Transfer, plan_moves, serving_sender
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.policy import solve
from shoal.engines.core.experts.published import solve_published
from shoal.engines.core.experts.schedule import schedule
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


@given(pairs(), st.integers(1, 10), st.integers(1, 25))
@settings(max_examples=200, deadline=None)
def test_a_schedule_carries_every_byte_once_within_the_budget(pair, expert_bytes, budget):
    old, new = pair
    plan = plan_moves(old, new)
    batches = schedule(plan, expert_bytes, budget)
    carried = dict.fromkeys(plan.transfers, 0)
    for batch in batches:
        for rank in range(old.ranks):
            assert sum(p.length for p in batch.pieces if p.transfer.sender == rank) <= budget
            assert sum(p.length for p in batch.pieces if p.transfer.receiver == rank) <= budget
        for piece in batch.pieces:
            assert piece.transfer.layer == batch.layer
            assert piece.first == carried[piece.transfer], "the bytes of an expert travel in order"
            carried[piece.transfer] += piece.length
        assert batch.pieces or batch.completes_layer, "an empty batch is only for a layer of copies"
    assert set(carried.values()) <= {expert_bytes}
    whole = [batch.layer for batch in batches if batch.completes_layer]
    assert whole == sorted({move.layer for move in (*plan.transfers, *plan.copies)})
    assert [batch.layer for batch in batches] == sorted(batch.layer for batch in batches)


def test_a_schedule_uses_its_budget():
    """Two disjoint pairs of ranks work at once; an expert larger than the budget takes several steps."""
    old = Placement.of(np.array([[0, 1, 2, 3]]), 4, 4)
    new = Placement.of(np.array([[1, 0, 3, 2]]), 4, 4)
    batches = schedule(plan_moves(old, new), expert_bytes=10, step_bytes_max=4)
    assert [[piece.length for piece in batch.pieces] for batch in batches] == [[4] * 4, [4] * 4, [2] * 4]
    assert [batch.completes_layer for batch in batches] == [False, False, True]
    with pytest.raises(ValueError, match="step_bytes_max = 0 and expert_bytes = 10 must be at least 1"):
        schedule(plan_moves(old, new), 10, 0)


def test_layers_change_one_by_one():
    """Tables of different widths: the published policy's are wider than ours."""
    old = Placement.start(3, 4, 2, 2)
    new = solve_published(np.array([[[9, 1, 1, 1]] * 3]), 2, 2)
    mixed = old.with_layers(new, (1,))
    mixed.check(allows_twins=True)
    assert np.array_equal(mixed.experts[[0, 2]], old.experts[[0, 2]])
    assert np.array_equal(mixed.experts[1], new.experts[1])
    assert np.array_equal(mixed.with_layers(new, (0, 2)).places, new.places)


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
