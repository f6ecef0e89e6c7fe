"""Pins of clients outside: each ends by release or at the end of its lease, whichever comes first. Time is given.

Clients know a lease by a number that the caller draws at random, so nobody can end another's by counting.
"""

from heapq import heappop, heappush


class Leases:
    """Which pins of the index are out, and until when. Not thread-safe."""

    def __init__(self) -> None:
        self._pins: dict[int, int] = {}  # lease: pin
        self._ends: list[tuple[int, int]] = []  # (end, lease), also of leases released meanwhile

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, lease: int, pin: int, ends_us: int) -> None:
        """A pin is out."""
        assert lease not in self._pins, f"lease {lease} is out already"
        self._pins[lease] = pin
        heappush(self._ends, (ends_us, lease))

    def release(self, lease: int) -> int | None:
        """Its client lets go: the pin to release, None if it is not out."""
        return self._pins.pop(lease, None)

    def ended(self, now_us: int) -> tuple[int, ...]:
        """Pins to release because their lease is over."""
        over = []
        while self._ends and self._ends[0][0] <= now_us:
            _, lease = heappop(self._ends)
            pin = self.release(lease)
            if pin is not None:
                over.append(pin)
        return tuple(over)
