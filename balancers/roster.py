"""The groups that may be given work, their newest reports and the room held at them: what every balancer keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shoal.balancers.reports import Choice, GroupRef, GroupScore
from shoal.balancers.reservations import Hold, Reservations


class Report(Protocol):
    """What the reports of all roles have in common."""

    @property
    def group(self) -> GroupRef:
        """Whose report it is."""

    @property
    def seq(self) -> int:
        """Increases within an epoch."""

    @property
    def known(self) -> tuple[str, ...]:
        """Reservations that have become part of the group's own numbers."""


R = TypeVar("R", bound=Report)


@dataclass(slots=True)
class Load(Generic[R]):
    """A ready group: its last report (None until the first) and how often it was chosen."""

    report: R | None = None
    chosen: int = 0


class Roster(Generic[R]):
    """Owned by one balancer. `width` is the number of amounts each hold has."""

    def __init__(self, width: int) -> None:
        self.loads: dict[GroupRef, Load[R]] = {}
        self.held = Reservations(width)

    def set_ready(self, groups: tuple[GroupRef, ...], now_us: int) -> None:
        """These groups may be given work; others are forgotten with what was held there."""
        self.loads = {group: self.loads.get(group, Load()) for group in groups}
        self.held.keep(frozenset(groups))
        self.held.expire(now_us)

    def report(self, report: R, now_us: int) -> None:
        """Take a group's own numbers; older ones and those of unknown lives are ignored."""
        load = self.loads.get(report.group)
        self.held.confirm(report.group, report.known)
        if load is not None and (load.report is None or report.seq > load.report.seq):
            load.report = report
        self.held.expire(now_us)

    def best(self, usable: Sequence[GroupScore], excluded: tuple[str, ...]) -> GroupScore:
        """The cheapest; excluded groups only if nothing else is usable; ties go to the one chosen less often."""
        preferred = [s for s in usable if s.group.name not in excluded] or usable
        return min(preferred, key=lambda s: (s.cost_us, self.loads[s.group].chosen, s.group))

    def choose(self, best: GroupScore, reservation: str, hold: Hold, scores: tuple[GroupScore, ...]) -> Choice:
        """Hold room at the best group and count it as chosen."""
        self.held.hold(reservation, hold)
        self.loads[best.group].chosen += 1
        return Choice(best.group, reservation, hold.expires_us, best.cost_us, scores)
