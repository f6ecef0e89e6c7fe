"""Two orders of grains kept as logs of whole chains: by last use, and by the time they expire; pure.

A log entry is a chain as it was written, with a mark. A grain's newest mark stands in an array, so an older entry
loses it without being searched for: an entry owns those of its ids whose mark is still its own. Touching a chain is
two vector operations however many grains are tracked. A log that is mostly stale is rebuilt from what it still owns:
amortised O(1) a reference, and at most about twice as many log places as resident grains.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
from shoal.kvstore.core.policy.verbs import NOBODY, Chain

Marks = npt.NDArray[np.int64]
_SLACK = 1024  # log places below which rebuilding is not worth its call


def lengthen(marks: npt.NDArray[np.generic], grains_max: int, fill: int) -> None:
    """Room for more grains, in place: a log shares the array with its policy, and nobody keeps a view of it."""
    known = len(marks)
    marks.resize(grains_max, refcheck=False)
    marks[known:] = fill


class ChainLog:
    """Entries (mark, chain), marks rising. `marks` is shared with whoever writes the marks of touched grains."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._entries: deque[tuple[int, Chain]] = deque()
        self._places = 0
        self._limit = _SLACK

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def places(self) -> int:
        """Log places taken, stale ones included; four bytes each, and about 120 bytes an entry."""
        return self._places

    @property
    def oldest(self) -> int:
        """Mark of the first entry; the log must not be empty."""
        return self._entries[0][0]

    def append(self, mark: int, chain: Chain) -> None:
        """A chain was touched; its marks in the array must be set already."""
        self._entries.append((mark, chain))
        self._places += len(chain)
        if self._places > self._limit:
            self._rebuild()

    def take(self) -> Chain:
        """Remove the oldest entry; the ids it still owns, in chain order."""
        mark, chain = self._entries.popleft()
        self._places -= len(chain)
        owned: Chain = chain[self._marks[chain] == mark]
        return owned

    def give_back(self, mark: int, chain: Chain) -> None:
        """Put back at the old end what was taken and is to stay."""
        self._entries.appendleft((mark, chain))
        self._places += len(chain)

    def owned(self) -> Iterator[tuple[int, Chain]]:
        """Every entry with the ids it still owns."""
        return ((mark, chain[self._marks[chain] == mark]) for mark, chain in self._entries)

    def _rebuild(self) -> None:
        self._entries = deque((mark, chain) for mark, chain in self.owned() if len(chain))
        self._places = sum(len(chain) for _, chain in self._entries)
        self._limit = 2 * self._places + _SLACK


class Ages:
    """The grains behind each first grain, so that they go together when the first is past its maximum age."""

    def __init__(self, grains_max: int, serial_of: Marks) -> None:
        self._serial_of = serial_of
        self._first_of = np.full(grains_max, -1, np.int32)
        self._born: dict[int, int] = {}  # by first grain
        self._queue: list[tuple[int, int]] = []  # (born, first grain)
        self._behind: dict[int, list[Chain]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}  # ids listed, ids at which to weed

    def born(self, first: int) -> int:
        """When this first grain was written; -1 if it is not stored."""
        return self._born.get(first, -1)

    def reserve(self, grains_max: int) -> None:
        """Room for more grains."""
        lengthen(self._first_of, grains_max, -1)

    def add(self, first: int, fresh: Chain, born_us: int) -> None:
        """New grains behind `first` (itself among them when it is new: then it was written at `born_us`)."""
        if first not in self._born:
            self._born[first] = born_us
            heappush(self._queue, (born_us, first))
            self._behind[first], self._sizes[first] = [], (0, _SLACK)
        self._first_of[fresh] = first
        self._behind[first].append(fresh)
        size, limit = self._sizes[first]
        size += len(fresh)
        if size > limit:
            kept = self.behind(first)
            self._behind[first] = [kept]
            size, limit = len(kept), 2 * len(kept) + _SLACK
        self._sizes[first] = (size, limit)

    def forget(self, ids: Chain) -> None:
        """First grains among `ids` are gone (and with them everything behind)."""
        for first in self.firsts(ids):
            del self._born[first], self._behind[first], self._sizes[first]

    def take_due(self, before_us: int) -> list[Chain]:
        """Resident grains behind every first grain born before this time."""
        due = []
        while self._queue and self._queue[0][0] < before_us:
            born_us, first = heappop(self._queue)
            if self.born(first) == born_us:
                due.append(self.behind(first))
        return due

    def ask_again(self, first: int) -> None:
        """What was due behind this first grain could not go yet: it is due again, if it is still stored."""
        if first in self._born:
            heappush(self._queue, (self._born[first], first))

    def behind(self, first: int) -> Chain:
        """Resident grains behind a first grain, itself among them; none if it is not stored."""
        listed = np.unique(np.concatenate(self._behind.get(first, [NOBODY])))
        # A number may belong to another grain by now.
        found: Chain = listed[(self._serial_of[listed] > 0) & (self._first_of[listed] == first)]
        return found

    def firsts(self, ids: Chain) -> list[int]:
        """Those of the ids that are first grains."""
        return [int(first) for first in ids[self._first_of[ids] == ids] if int(first) in self._born]
