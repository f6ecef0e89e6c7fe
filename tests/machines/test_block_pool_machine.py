"""Random programs on the block pool against a model that is too simple to be wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shoal.engines.core.blocks import Availability, BlockPool

COUNT = 9


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of free ids in order, and a list with every reference held."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(COUNT)
        self.free = list(range(1, COUNT))
        self.held = []

    @rule(wanted=st.integers(0, COUNT + 1))
    def allocate(self, wanted):
        expected = "NEVER" if wanted > COUNT - 1 else "OK" if wanted <= len(self.free) else "LATER"
        assert self.pool.availability(wanted) == expected
        if expected != Availability.OK:
            with pytest.raises(ValueError, match="cannot allocate"):
                self.pool.allocate(wanted)
            return
        taken, self.free = self.free[:wanted], self.free[wanted:]
        assert self.pool.allocate(wanted) == taken
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data):
        order = data.draw(st.permutations(self.held))
        gone = order[: data.draw(st.integers(1, len(order)))]
        self.pool.free(gone)
        for one in reversed(gone):
            self.held.remove(one)
            if one not in self.held:
                self.free.append(one)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data):
        one = data.draw(st.sampled_from(self.held))
        self.pool.pin(one)
        self.held.append(one)

    @rule(one=st.integers(-1, COUNT + 1))
    def misuse(self, one):
        if one in self.held:
            return
        for misuse in (lambda: self.pool.free([one]), lambda: self.pool.pin(one)):
            with pytest.raises(ValueError, match=f"id {one}"):
                misuse()

    @rule(data=st.data())
    def free_once_too_often(self, data):
        if not self.held:
            return
        one = data.draw(st.sampled_from(self.held))
        with pytest.raises(ValueError, match=f"cannot free id {one}"):
            self.pool.free([one] * (self.held.count(one) + 1))

    @invariant()
    def agrees(self):
        assert list(self.pool.free_ids()) == self.free
        assert self.pool.references() == {one: self.held.count(one) for one in set(self.held)}
        assert self.pool.free_count + self.pool.owned_count == COUNT - 1
        self.pool.check(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_check_notices_a_lost_reference():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check([1])
    pool.check([1, 2])
