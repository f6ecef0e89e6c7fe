"""What the trained toy shall reach, in one place, and whether a report's figures reach it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.engines.toy.evaluate.losses import Loss


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure, by the key it has in `findings`, must be at least (or, with `is_ceiling`, at most) `bound`."""

    key: str
    bound: float
    is_ceiling: bool = False

    @property
    def wanted(self) -> str:
        """The rule as readers see it."""
        sign = "≤" if self.is_ceiling else "≥"
        return f"{sign} {self.bound:g}"

    def is_met(self, found: float) -> bool:
        """Whether a figure reaches the goal."""
        return found <= self.bound if self.is_ceiling else found >= self.bound


@dataclass(frozen=True, slots=True)
class Mark:
    """A goal, what was found, and whether that is enough."""

    goal: Goal
    found: float

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.goal.is_met(self.found)


def accuracy_key(paper: str) -> str:
    """Key of a paper's share of right answers."""
    return f"accuracy of {paper}"


def validity_key(paper: str) -> str:
    """Key of a paper's share of well-formed answers."""
    return f"validity of {paper}"


def drop_key(loss: Loss) -> str:
    """Key of the accuracy that losing a kind costs its own paper."""
    return f"drop without {loss.value}"


def length_key(choice: str) -> str:
    """Key of the accepted length, bonus token included, under a choice of tokens."""
    return f"accepted length, {choice}"


def calibration_key(choice: str) -> str:
    """Key of the confidence's expected calibration error under a choice of tokens."""
    return f"calibration error, {choice}"


GREEDY, SAMPLED = "greedy", "temperature 1"
GOALS: tuple[Goal, ...] = (
    *(Goal(accuracy_key(f"recall-2048-{turn}"), 0.95) for turn in ("first", "second")),
    *(Goal(accuracy_key(f"recall-4000-{turn}"), 0.90) for turn in ("first", "second")),
    Goal(accuracy_key("copying"), 0.97),
    Goal(accuracy_key("pictures"), 0.95),
    *(Goal(validity_key(paper), 0.99) for paper in ("schema", "tools")),
    *(Goal(accuracy_key(paper), 0.90) for paper in ("schema", "tools", "arithmetic")),
    *(Goal(length_key(choice), 3.2) for choice in (GREEDY, SAMPLED)),
    *(Goal(calibration_key(choice), 0.05, is_ceiling=True) for choice in (GREEDY, SAMPLED)),
    *(Goal(drop_key(loss), 0.10 if loss is Loss.ENGRAM else 0.30) for loss in Loss),
)


def marks(findings: Mapping[str, float]) -> tuple[Mark, ...]:
    """The goals about which something was found, in their order."""
    return tuple(Mark(goal, findings[goal.key]) for goal in GOALS if goal.key in findings)
