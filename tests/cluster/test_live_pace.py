"""Ranks of a group fall asleep together, and one that gets work calls the others to the next vote."""

from typing import cast

from shoal.cluster.live.pace import Alone, Together
from shoal.engines.core.plan import StepKind
from shoal.engines.run.engine import Engine
from shoal.engines.run.group_steps import GroupSteps


class Rank:
    """An engine that has work or not, its pace, and the calls of it that are on their way to the others."""

    def __init__(self) -> None:
        self.has_work = False
        self.votes = 0
        self.calls: list[int] = []
        self.outcome: StepKind | None = None
        self.pace = Together(cast(GroupSteps, self), self.calls.append)

    def agree(self, engine: Engine, now_us: int) -> StepKind | None:
        self.votes += 1
        return self.outcome

    @property
    def is_awake(self) -> bool:
        return self.pace.is_awake(cast(Engine, self))


def vote(*ranks: Rank) -> None:
    """All of them vote, as a collective makes them."""
    assert all(rank.is_awake for rank in ranks), "a rank would wait for the others for ever"
    outcome = StepKind.DECODE if any(rank.has_work for rank in ranks) else None
    for rank in ranks:
        rank.outcome = outcome
        assert rank.pace.verdict(cast(Engine, rank), 0) == (outcome is not None, outcome)


def test_work_wakes_all_and_they_sleep_when_nobody_has_any() -> None:
    first, second = Rank(), Rank()
    assert not first.is_awake
    first.has_work = True
    assert first.is_awake
    assert (first.calls, first.is_awake, first.calls) == ([0], True, [0]), "one call is enough"
    second.pace.wake(0)
    vote(first, second)
    assert second.is_awake, "the others' work keeps a rank awake"
    first.has_work = False
    vote(first, second)
    assert not first.is_awake
    assert not second.is_awake


def test_a_call_to_a_vote_that_is_over_wakes_nobody() -> None:
    """Both got work at once and called each other; one call arrives when both sleep again."""
    first, second = Rank(), Rank()
    first.has_work = second.has_work = True
    vote(first, second)
    first.has_work = second.has_work = False
    vote(first, second)
    second.pace.wake(first.calls[0])
    assert not second.is_awake
    first.has_work = True
    assert first.is_awake
    assert first.calls == [0, 2]
    second.pace.wake(first.calls[1])
    vote(first, second)


def test_a_group_of_one_steps_while_it_has_work() -> None:
    rank, alone = Rank(), Alone()
    assert not alone.is_awake(cast(Engine, rank))
    rank.has_work = True
    assert alone.is_awake(cast(Engine, rank))
    assert alone.verdict(cast(Engine, rank), 0) == (True, None)
