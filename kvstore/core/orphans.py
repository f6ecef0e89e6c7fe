"""Objects whose predecessor is not stored yet: they wait a bounded time, in bounded number, for it to arrive."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.kvstore.core.records import Kind, TableEntry

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Orphan(Generic[S]):
    """One waiting object and the stripe that holds it."""

    entry: TableEntry
    stripe: S


class Orphans(Generic[S]):
    """Waiting objects by the key of the grain they need: a grain's predecessor, an anchor's own grain."""

    def __init__(self, count_max: int, grace_us: int) -> None:
        self._count_max = count_max
        self._grace_us = grace_us
        self._waiting: dict[bytes, dict[tuple[Kind, bytes], Orphan[S]]] = {}
        self._queue: deque[tuple[int, bytes, Orphan[S]]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: TableEntry, stripe: S, now_us: int) -> bool:
        """Let an object wait; False when an equal one waits already or too many do."""
        needed, name = needed_key(entry), (entry.kind, entry.key)
        if self._count >= self._count_max or name in self._waiting.get(needed, {}):
            return False
        orphan = Orphan(entry, stripe)
        self._waiting.setdefault(needed, {})[name] = orphan
        self._queue.append((now_us + self._grace_us, needed, orphan))
        self._count += 1
        return True

    def take(self, needed: bytes) -> tuple[Orphan[S], ...]:
        """Remove and return everything that waited for the grain `needed`."""
        found = tuple(self._waiting.pop(needed, {}).values())
        self._count -= len(found)
        return found

    def take_object(self, entry: TableEntry, stripe: S) -> Orphan[S] | None:
        """Remove and return one waiting object of this stripe, if it waits."""
        needed, name = needed_key(entry), (entry.kind, entry.key)
        orphan = self._waiting.get(needed, {}).get(name)
        if orphan is None or orphan.stripe is not stripe:
            return None
        self._remove(needed, orphan)
        return orphan

    def take_due(self, now_us: int) -> tuple[Orphan[S], ...]:
        """Remove and return those that have waited their grace; amortised O(1) each."""
        due = []
        while self._queue and self._queue[0][0] <= now_us:
            _, needed, orphan = self._queue.popleft()
            if self._waiting.get(needed, {}).get((orphan.entry.kind, orphan.entry.key)) is orphan:
                self._remove(needed, orphan)
                due.append(orphan)
        return tuple(due)

    def _remove(self, needed: bytes, orphan: Orphan[S]) -> None:
        del self._waiting[needed][orphan.entry.kind, orphan.entry.key]
        self._count -= 1
        if not self._waiting[needed]:
            del self._waiting[needed]


def needed_key(entry: TableEntry) -> bytes:
    """The key of the grain that must be stored before this object can be offered."""
    return entry.parent if entry.kind is Kind.GRAIN else entry.key
