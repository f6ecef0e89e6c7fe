"""Calls in flight of one request: numbered, each with its time limit; an answer is taken once."""

from dataclasses import dataclass

from shoal.balancers.reports import GroupRef


@dataclass(frozen=True, slots=True)
class Ask:
    """One call: what it is, when its answer is no longer waited for, and at which group (or image) it is."""

    number: int
    kind: str
    due_us: int
    group: GroupRef | None = None
    image_index: int = -1

    @property
    def group_name(self) -> str:
        """The group's name; "" for calls to the index or a balancer."""
        return self.group.name if self.group else ""


class Asks:
    """Open calls by number. `dropped` remembers what nobody waits for any more, so a late answer can be undone."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, Ask] = {}
        self._undo: dict[int, tuple[GroupRef | None, str, str]] = {}

    def open(self, kind: str, due_us: int, group: GroupRef | None = None, image_index: int = -1) -> int:
        """Number of a new call."""
        number, self._next = self._next, self._next + 1
        self._open[number] = Ask(number, kind, due_us, group, image_index)
        return number

    def undo_with(self, number: int, group: GroupRef | None, balancer: str, name: str) -> None:
        """If this call is dropped and answered late: abort `name` at `group`, or release it at `balancer`."""
        self._undo[number] = (group, balancer, name)

    def take(self, number: int) -> Ask | None:
        """End the wait for this call; None if nobody waits for it (answered before, or dropped)."""
        ask = self._open.pop(number, None)
        if ask is not None:
            self._undo.pop(number, None)
        return ask

    def drop(self, number: int) -> Ask | None:
        """Stop waiting, but remember how to undo it."""
        return self._open.pop(number, None)

    def drop_all(self) -> None:
        """Stop waiting for anything."""
        self._open.clear()

    def late(self, number: int) -> tuple[GroupRef | None, str, str] | None:
        """How to undo a dropped call that was answered after all; once."""
        return None if number in self._open else self._undo.pop(number, None)

    def at(self, group: GroupRef, kind: str) -> tuple[Ask, ...]:
        """Open calls of a kind at one group."""
        return tuple(ask for ask in self._open.values() if ask.group == group and ask.kind == kind)

    def any(self, *kinds: str) -> bool:
        """Whether a call of one of these kinds is open."""
        return any(ask.kind in kinds for ask in self._open.values())

    def overdue(self, now_us: int) -> tuple[Ask, ...]:
        """Open calls whose time has passed."""
        return tuple(ask for ask in self._open.values() if ask.due_us <= now_us)

    def due_us(self) -> tuple[int, ...]:
        """When open calls are due."""
        return tuple(ask.due_us for ask in self._open.values())
