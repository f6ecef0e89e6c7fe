"""The pool that hands out block ids and, as a second instance, slot ids; id 0 is null and never handed out."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import StrEnum


class Availability(StrEnum):
    """Whether ids can be had: now, after others are freed, or never in this pool."""

    OK = "OK"
    LATER = "LATER"
    NEVER = "NEVER"


class BlockPool:
    """Reference-counted ids 1..count-1, given out first in, first out; every operation is O(1) an id.

    Invariant: an id is in the free list exactly if nobody refers to it, so free + owned == count - 1. Using an id
    that is not owned is a defect of the caller and raises ValueError before anything changes.
    """

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"count = {count} must be at least 2: id 0 is null and at least one id must be usable")
        self.count = count
        self._free: deque[int] = deque(range(1, count))
        self._references = [0] * count

    @property
    def free_count(self) -> int:
        """Ids that can be had now."""
        return len(self._free)

    @property
    def owned_count(self) -> int:
        """Ids somebody refers to."""
        return self.count - 1 - len(self._free)

    def availability(self, wanted: int) -> Availability:
        """Whether `wanted` ids can be had. NEVER counts the null id: count - 1 is the most that can succeed."""
        if wanted >= self.count:
            return Availability.NEVER
        return Availability.OK if wanted <= len(self._free) else Availability.LATER

    def allocate(self, wanted: int) -> list[int]:
        """Take ids from the head of the free list, one reference each. Raises ValueError when too few are free."""
        if not 0 <= wanted <= len(self._free):
            raise ValueError(f"cannot allocate {wanted} ids: {len(self._free)} are free; test availability first")
        taken = [self._free.popleft() for _ in range(wanted)]
        for one in taken:
            self._references[one] = 1
        return taken

    def pin(self, one: int) -> None:
        """Add a reference to an owned id. Raises ValueError for a free id and for the null id."""
        self._require_owned(one, "pin")
        self._references[one] += 1

    def free(self, ids: Sequence[int]) -> None:
        """Drop one reference of each id, from the last to the first; ids without one join the tail of the free list.

        Raises ValueError for the null id and for an id that is freed more often than it is owned.
        """
        for one in ids:
            self._require_owned(one, "free")
        if len(set(ids)) < len(ids):
            for one, times in Counter(ids).items():
                if times > self._references[one]:
                    raise ValueError(f"cannot free id {one} {times} times: it is owned {self._references[one]} times")
        for one in reversed(ids):
            self._references[one] -= 1
            if not self._references[one]:
                self._free.append(one)

    def references_of(self, one: int) -> int:
        """How often an id is referred to."""
        return self._references[one]

    def references(self) -> dict[int, int]:
        """Owned ids and how often each is referred to."""
        return {one: count for one, count in enumerate(self._references) if count}

    def free_ids(self) -> tuple[int, ...]:
        """The free list, head first."""
        return tuple(self._free)

    def check(self, owners: Iterable[int]) -> None:
        """Assert conservation: `owners` lists every reference that anybody holds, once for each reference."""
        expected = [0] * self.count
        for one in owners:
            expected[one] += 1
        assert not expected[0], "the null id is owned"
        assert expected == self._references, (
            f"references differ from owners: {self.references()} against "
            f"{ {one: count for one, count in enumerate(expected) if count} }"
        )
        free = set(self._free)
        assert len(free) == len(self._free), f"an id is twice in the free list {self.free_ids()}"
        assert free == {one for one in range(1, self.count) if not self._references[one]}, "free list is not the rest"

    def _require_owned(self, one: int, verb: str) -> None:
        if one == 0:
            raise ValueError(f"cannot {verb} id 0: it is the null id")
        if not 0 < one < self.count or not self._references[one]:
            raise ValueError(f"cannot {verb} id {one}: nobody owns it")
