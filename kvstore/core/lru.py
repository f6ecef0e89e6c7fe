"""Which objects stay in a bounded memory: least recently used by bytes, O(1) an operation; pure, no clock."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ByteLru(Generic[K]):
    """Values by key, at most `capacity_bytes` of them together; the one unused for longest goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._values: OrderedDict[K, bytes] = OrderedDict()  # oldest use first

    def __len__(self) -> int:
        return len(self._values)

    @property
    def held_bytes(self) -> int:
        """Bytes of all values."""
        return self._held_bytes

    def peek(self, key: K) -> bytes | None:
        """The value, its age unchanged."""
        return self._values.get(key)

    def touch(self, key: K) -> bool:
        """Count a use; False if the key is not held."""
        if key not in self._values:
            return False
        self._values.move_to_end(key)
        return True

    def put(self, key: K, value: bytes) -> None:
        """Hold a value as the youngest, and let go of the oldest until all fit; one larger than all is not held."""
        if len(value) > self._capacity_bytes:
            return
        self._held_bytes += len(value) - len(self._values.pop(key, b""))
        self._values[key] = value
        while self._held_bytes > self._capacity_bytes:
            self._held_bytes -= len(self._values.popitem(last=False)[1])


def leading(sizes: Sequence[int], capacity_bytes: int) -> int:
    """How many values from the front fit together: the part of a prefix that is worth holding.

    A prefix is only of use from its start. One longer than the memory would push itself out, and hit nothing ever.
    """
    filled = 0
    for count, size in enumerate(sizes):
        filled += size
        if filled > capacity_bytes:
            return count
    return len(sizes)
