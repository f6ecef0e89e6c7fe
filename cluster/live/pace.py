"""When an engine steps: as long as it has work, or, as a rank of a group, as long as any rank has."""

from collections.abc import Callable
from typing import Protocol

from shoal.engines.core.plan import StepKind
from shoal.engines.run.engine import Engine
from shoal.engines.run.group_steps import GroupSteps


class Pace(Protocol):
    """Asked by the step loop, on its thread, between two steps."""

    def is_awake(self, engine: Engine) -> bool:
        """Whether to go on now; if not, the loop sleeps until somebody calls."""
        ...

    def wake(self, vote: int) -> None:
        """Another rank calls to a vote."""
        ...

    def verdict(self, engine: Engine, now_us: int) -> tuple[bool, StepKind | None]:
        """Whether to step, and the kind that was voted for (None: the engine decides)."""
        ...


class Alone:
    """A group of one rank."""

    def is_awake(self, engine: Engine) -> bool:
        """See Pace."""
        return engine.has_work

    def wake(self, vote: int) -> None:
        """There is no other rank."""

    def verdict(self, engine: Engine, now_us: int) -> tuple[bool, StepKind | None]:
        """See Pace."""
        return True, None


class Together:
    """A rank of a group. All ranks are awake or asleep between the same two votes.

    Awake, each takes part in every vote, and all fall asleep after one in which nobody had work. Asleep, a rank that
    gets work wakes itself and calls the others to the next vote by its number, so that a call that comes late, to a
    vote that is over, wakes nobody.
    """

    def __init__(self, steps: GroupSteps, wake_others: Callable[[int], object]) -> None:
        self._steps, self._wake_others = steps, wake_others
        self._is_awake = False

    def wake(self, vote: int) -> None:
        """See Pace."""
        self._is_awake = self._is_awake or vote >= self._steps.votes

    def is_awake(self, engine: Engine) -> bool:
        """See Pace."""
        if not self._is_awake and engine.has_work:
            self._is_awake = True
            self._wake_others(self._steps.votes)
        return self._is_awake

    def verdict(self, engine: Engine, now_us: int) -> tuple[bool, StepKind | None]:
        """See Pace. Waits for the other ranks; raises GroupBrokenError."""
        kind = self._steps.agree(engine, now_us)
        self._is_awake = kind is not None
        return self._is_awake, kind
