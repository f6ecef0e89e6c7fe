"""Verified objects in this process's memory, in front of the devices: bounded, thread-safe, filled by reads and writes.

Only what was verified against its key's checksum, or has just been made durable by this process, comes in; values
are immutable copies, so nobody can change them afterwards. A key names its whole past and its namespace: an object
is the same wherever and whenever it was stored, so nothing here ever has to be invalidated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from shoal.kvstore.core.lru import ByteLru, leading
from shoal.kvstore.core.records import Kind

Name = tuple[Kind, bytes]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What the cache holds now, and since the start: objects asked for that it had (`hits`, `hit_bytes`) or had not."""

    capacity_bytes: int
    held_bytes: int
    objects: int
    hits: int
    hit_bytes: int
    misses: int


class HostCache:
    """Objects by (kind, key); capacity 0 holds nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lru: ByteLru[Name] = ByteLru(capacity_bytes)
        self._lock = Lock()
        self._hits = self._hit_bytes = self._misses = 0

    @property
    def usage(self) -> CacheUsage:
        """Counts now."""
        with self._lock:
            return CacheUsage(
                self._capacity_bytes, self._lru.held_bytes, len(self._lru), self._hits, self._hit_bytes, self._misses
            )

    def get(self, name: Name) -> memoryview | None:
        """A read-only view of the object. Its age changes when `keep` names it, with the prefix that it served."""
        if not self._capacity_bytes:
            return None
        with self._lock:
            value = self._lru.peek(name)
            if value is None:
                self._misses += 1
                return None
            self._hits += 1
            self._hit_bytes += len(value)
        return memoryview(value)

    def keep(self, objects: Sequence[tuple[Name, memoryview]]) -> None:
        """Hold copies of verified objects, in prompt order, as far as they fit together.

        The first become the youngest: every prompt with this prefix needs those, fewer need the later ones.
        """
        count = leading([payload.nbytes for _, payload in objects], self._capacity_bytes)
        for name, payload in reversed(objects[:count]):
            with self._lock:
                if self._lru.touch(name):
                    continue
            copied = bytes(payload)
            with self._lock:
                self._lru.put(name, copied)
