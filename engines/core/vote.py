"""How the ranks of a group agree on the kind of the next step: a pure function of everybody's ballots."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from shoal.engines.config import Role
from shoal.engines.core.plan import Ballot, StepKind


class Point(StrEnum):
    """What a decode step counter allows: prefill if all want it, if any does, or not at all."""

    ALL = "all"
    ANY = "any"
    NONE = "none"


class Tally(NamedTuple):
    """The verdict and how it came about.

    `contributed[rank]` are that rank's values to the minimum of each round held: in an ALL round 1 wants prefill, in
    an ANY round 0 does, in the second round 0 means that the rank has something to schedule or report.
    """

    verdict: StepKind
    point: Point
    contributed: tuple[tuple[int, ...], ...]


def point_of(decode_step: int, all_interval: int, any_interval: int) -> Point:
    """Which point a decode step counter is; ANY wins where both fall together (engine runtime notes 2)."""
    if decode_step and decode_step % any_interval == 0:
        return Point.ANY
    return Point.ALL if decode_step % all_interval == 0 else Point.NONE


def tally(ballots: Sequence[Ballot]) -> Tally:
    """Count one step's ballots of all ranks. Raises ValueError if the ranks are not of one group or out of step."""
    first = ballots[0]
    for ballot in ballots:
        if (ballot.role, ballot.decode_step) != (first.role, first.decode_step):
            raise ValueError(
                f"ranks out of step: {ballot.role} at decode_step {ballot.decode_step} and "
                f"{first.role} at {first.decode_step} voted together"
            )
    silent = tuple(() for _ in ballots)
    if first.role is not Role.NORMAL:
        return Tally(StepKind.PREFILL if first.role is Role.PROMPT else StepKind.DECODE, Point.NONE, silent)
    point = point_of(first.decode_step, first.all_interval, first.any_interval)
    if first.vote_when_idle and all(ballot.is_idle for ballot in ballots):
        point = Point.ANY
    if point is Point.NONE:
        return Tally(StepKind.DECODE, point, silent)
    wanting = 0 if point is Point.ANY else 1
    opening = [wanting if ballot.wants else 1 - wanting for ballot in ballots]
    if min(opening) != wanting:
        return Tally(StepKind.DECODE, point, tuple((one,) for one in opening))
    second = [0 if ballot.wants and ballot.has_result else 1 for ballot in ballots]
    verdict = StepKind.DECODE if min(second) else StepKind.PREFILL
    return Tally(verdict, point, tuple(zip(opening, second, strict=True)))


def decide(ballots: Sequence[Ballot]) -> StepKind:
    """The kind of the next step of the whole group."""
    return tally(ballots).verdict
