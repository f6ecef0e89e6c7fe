"""Room held for requests between a choice and the engine's next report; it always ends by itself."""

from dataclasses import dataclass

from shoal.balancers.reports import GroupRef


@dataclass(frozen=True, slots=True)
class Hold:
    """`amounts` (their meaning is the balancer's) held at `group` until `expires_us`."""

    group: GroupRef
    amounts: tuple[int, ...]
    expires_us: int


class Reservations:
    """Holds by reservation id. A hold ends by release, by a report that names it, by its time, or with its group."""

    def __init__(self, width: int) -> None:
        """`width` is the number of amounts each hold has."""
        self._width = width
        self._holds: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, reservation: str, hold: Hold) -> None:
        """Keep `hold`, replacing an earlier one of the same id."""
        assert len(hold.amounts) == self._width, f"hold has {len(hold.amounts)} amounts, expected {self._width}"
        self._holds[reservation] = hold

    def release(self, reservation: str) -> bool:
        """End a hold; False if there is none (released twice, expired, or already in a report)."""
        return self._holds.pop(reservation, None) is not None

    def confirm(self, group: GroupRef, known: tuple[str, ...]) -> None:
        """The group's own numbers now contain these: end their holds there."""
        for reservation in known:
            hold = self._holds.get(reservation)
            if hold is not None and hold.group == group:
                del self._holds[reservation]

    def expire(self, now_us: int) -> None:
        """End the holds whose time has passed."""
        self._holds = {key: hold for key, hold in self._holds.items() if hold.expires_us > now_us}

    def keep(self, groups: frozenset[GroupRef]) -> None:
        """End the holds at any other group: it is gone, and so is what was held there."""
        self._holds = {key: hold for key, hold in self._holds.items() if hold.group in groups}

    def held(self, group: GroupRef) -> tuple[int, ...]:
        """(number of holds, *sum of each amount) at the group."""
        mine = [hold.amounts for hold in self._holds.values() if hold.group == group]
        return (len(mine), *(sum(column) for column in zip(*mine, strict=True))) if mine else (0,) * (self._width + 1)

    def __contains__(self, reservation: object) -> bool:
        return reservation in self._holds
