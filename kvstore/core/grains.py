"""The forest of stored grains: a number for each key, and who stands before and behind whom; pure.

Numbers are small and used again, so what belongs to a grain stands in flat arrays here and in the policy, and a
prompt's prefix is one array of numbers. There are no holes: whoever removes a grain removes all behind it.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from shoal.kvstore.core.policy.verbs import Chain

S = TypeVar("S")
NONE = -1
_START = 1024  # numbers to begin with; doubled when they are all taken


class Grains(Generic[S]):
    """Stored grains by number. O(1) an operation and grain, `chain` O(grains of the prefix)."""

    def __init__(self) -> None:
        self.limit = _START  # numbers are below it; it only rises
        self.traffic = bytearray()
        self._stripe: list[S | None] = []
        self.anchors: dict[int, S] = {}
        self._has_anchor = np.zeros(_START, np.bool_)
        self._number: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._parent, self._child = array("i"), array("i")  # one of the children; the others are its siblings
        self._older, self._younger = array("i"), array("i")
        self._depth = array("i")
        self._free = array("i")

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, key: bytes) -> bool:
        return key in self._number

    def find(self, key: bytes) -> int:
        """The number of a stored key; NONE."""
        return self._number.get(key, NONE)

    def depth(self, grain: int) -> int:
        """Grains before this one in its prompt."""
        return self._depth[grain]

    def stripe_of(self, grain: int) -> S:
        """The stripe that holds a stored grain."""
        stripe = self._stripe[grain]
        assert stripe is not None, f"grain {grain} is not stored"
        return stripe

    def parent(self, grain: int) -> int:
        """The grain before; NONE for a first one."""
        return self._parent[grain]

    def add(self, key: bytes, parent: int, traffic: int, stripe: S) -> int:
        """Store a grain behind `parent` (NONE: a first one); its number."""
        assert key not in self._number, f"grain {key.hex()} is stored already"
        depth = 0 if parent == NONE else self._depth[parent] + 1
        if self._free:
            grain = self._free.pop()
            self._keys[grain], self._stripe[grain], self.traffic[grain] = key, stripe, traffic
            self._parent[grain], self._depth[grain] = parent, depth
        else:
            grain = len(self._keys)
            self._keys.append(key)
            self._stripe.append(stripe)
            self.traffic.append(traffic)
            self._parent.append(parent)
            self._depth.append(depth)
            for links in (self._child, self._older, self._younger):
                links.append(NONE)
            if grain == self.limit:
                self.limit *= 2
                self._has_anchor = np.concatenate((self._has_anchor, np.zeros(grain, np.bool_)))
        self._number[key] = grain
        if parent != NONE:
            self._link(grain, parent)
        return grain

    def remove(self, grain: int) -> S:
        """Forget a grain, behind which none is stored when all that is to go has gone; its stripe."""
        stripe = self.stripe_of(grain)
        assert grain not in self.anchors, f"the anchor after grain {grain} is stored still"
        del self._number[self._keys[grain]]
        self._keys[grain], self._stripe[grain] = b"", None
        if self._parent[grain] != NONE:
            self._unlink(grain)
        self._free.append(grain)
        return stripe

    def set_anchor(self, grain: int, stripe: S) -> None:
        """An anchor follows this grain."""
        self.anchors[grain] = stripe
        self._has_anchor[grain] = True

    def take_anchor(self, grain: int) -> S | None:
        """Forget the anchor after this grain: its stripe, None if there was none."""
        self._has_anchor[grain] = False
        return self.anchors.pop(grain, None)

    def anchored(self, chain: Chain) -> list[int]:
        """Places in the chain that an anchor follows, in order."""
        found: list[int] = self._has_anchor[chain].nonzero()[0].tolist()
        return found

    def deepest(self, keys: Sequence[bytes]) -> int:
        """The last grain of the longest stored prefix of `keys`; NONE. O(log keys): there are no holes.

        Keys that are not one prompt's find nothing or an honest prompt's prefix, whose payloads are bound to other
        keys.
        """
        number = self._number
        if not keys or keys[0] not in number:
            return NONE
        stored = bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in number)
        grain = number[keys[stored - 1]]
        return grain if self._depth[grain] == stored - 1 else NONE

    def chain(self, grain: int) -> Chain:
        """Numbers from the first grain of the prompt to this one."""
        path, parent = [], self._parent
        while grain >= 0:
            path.append(grain)
            grain = parent[grain]
        path.reverse()
        return np.frombuffer(array("i", path), np.int32)

    def behind(self, grains: Iterable[int]) -> list[int]:
        """These grains and all behind them, each once."""
        found = dict.fromkeys(grains)
        todo = list(found)
        while todo:
            at = self._child[todo.pop()]
            while at != NONE:
                if at not in found:
                    found[at] = None
                    todo.append(at)
                at = self._older[at]
        return list(found)

    def _link(self, grain: int, parent: int) -> None:
        older = self._child[parent]
        self._older[grain], self._younger[grain] = older, NONE
        if older != NONE:
            self._younger[older] = grain
        self._child[parent] = grain

    def _unlink(self, grain: int) -> None:
        older, younger, parent = self._older[grain], self._younger[grain], self._parent[grain]
        if older != NONE:
            self._younger[older] = younger
        if younger != NONE:
            self._older[younger] = older
        else:
            self._child[parent] = older
        self._parent[grain] = self._older[grain] = self._younger[grain] = NONE
