"""Who keeps what from going, and until when at the latest: pins with an owner and an end; pure, time is an argument.

A pin ends by completion. Two things may keep that from arriving: its owner ends, or the message is lost on the way
while the owner lives on (an index that was not to be reached for a moment, an answer that never came, so that the
owner knows no number to release). The first is seen by whoever watches processes; the second ends at the pin's end.
"""

from hashlib import sha256
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
# No read takes this long; whoever asks for more is a clock gone wrong, and would keep its grains for ever.
HOLD_US_MAX = 3_600_000_000
_SLACK = 64  # ends of pins released meanwhile below which weeding is not worth its call


def first_pin(boot_id: str) -> int:
    """Pins of this life are numbered from here: a release that was meant for an earlier life's pin finds none."""
    return int.from_bytes(sha256(boot_id.encode()).digest()[:5]) << 22  # room for 4 M pins in any quick succession


class Pins(Generic[T]):
    """Pins by number, each over one value of its holder. O(log pins) an operation; `of` and `owners` O(pins)."""

    def __init__(self, boot_id: str) -> None:
        self._count = first_pin(boot_id)
        self._held: dict[int, tuple[T, str]] = {}
        self._ends: list[tuple[int, int]] = []  # (end, pin), also of pins released meanwhile

    def __len__(self) -> int:
        return len(self._held)

    def add(self, value: T, owner: str, now_us: int, hold_us: int) -> int:
        """A new pin's number; it ends by `release`, or `hold_us` (0 to HOLD_US_MAX, cut to that) from now."""
        self._count += 1
        self._held[self._count] = (value, owner)
        heappush(self._ends, (now_us + min(max(hold_us, 0), HOLD_US_MAX), self._count))
        if len(self._ends) > _SLACK + 4 * len(self._held):
            self._ends = [end for end in self._ends if end[1] in self._held]
            heapify(self._ends)
        return self._count

    def release(self, pin: int) -> T | None:
        """End a pin: what it was over; None if it is unknown (ended already, or of an earlier life)."""
        held = self._held.pop(pin, None)
        return None if held is None else held[0]

    def overdue(self, now_us: int) -> tuple[int, ...]:
        """Pins past their end, to be released; each is told once."""
        due = []
        while self._ends and self._ends[0][0] <= now_us:
            _, pin = heappop(self._ends)
            if pin in self._held:
                due.append(pin)
        return tuple(due)

    def owners(self) -> frozenset[str]:
        """Everybody who holds a pin."""
        return frozenset(owner for _, owner in self._held.values())

    def of(self, owner: str) -> tuple[int, ...]:
        """The pins of one owner."""
        return tuple(pin for pin, (_, name) in self._held.items() if name == owner)
