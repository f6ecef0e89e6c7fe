"""Calls in flight of one request: numbered, each with its time limit; an answer is taken once."""

from dataclasses import dataclass

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.messages import Abort, ReleaseChoice

Undo = Abort | ReleaseChoice


@dataclass(frozen=True, slots=True)
class Ask:
    """One call: what it is, when its answer is no longer waited for, and at which group (or for which image)."""

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
    """Open calls by number. A dropped call is remembered by its undo, in case it is answered after all."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, Ask] = {}
        self._undo: dict[int, Undo] = {}

    def open(self, ask: Ask, undo: Undo | None) -> None:
        """A new call; `undo` gives back what an answer nobody waits for has brought."""
        self._open[ask.number] = ask
        if undo is not None:
            self._undo[ask.number] = undo

    def next_number(self) -> int:
        """A number for the next call."""
        self._last += 1
        return self._last

    def take(self, number: int) -> Ask | None:
        """End the wait for this call by its answer; None if nobody waits for it (answered before, or dropped)."""
        ask = self._open.pop(number, None)
        if ask is not None:
            self._undo.pop(number, None)
        return ask

    def drop(self, number: int) -> Ask | None:
        """Stop waiting: the call failed or is overdue, but its peer may act yet."""
        return self._open.pop(number, None)

    def drop_all(self) -> None:
        """Stop waiting for anything."""
        self._open.clear()

    def late(self, number: int) -> Undo | None:
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
