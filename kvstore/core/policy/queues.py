"""Policies of single objects behind the chain verbs: FIFO, LFU, SIEVE, S3-FIFO and ARC; pure.

They see a chain as its grains one after another, head first, and know no prefix, so they may strand grains; what a
request can use is still its leading hits. Rules and defaults are those of libCacheSim 0.3.5 (its S3FIFO.c, ARC.c,
LFU.c, Sieve.c were read for facts), whose counts the golden file holds. A queue is a deque whose positions are
implicit: a grain's array keeps the position that still counts, so leaving a queue is O(1) without links.
"""

from collections import OrderedDict, deque

import numpy as np
from shoal.kvstore.core.policy.verbs import NOBODY, Chain, Served, leading
from shoal.kvstore.errors import ConfigError


class _Queue:
    """Grains in order of entry; one may leave from anywhere by losing its position. O(1) amortised."""

    def __init__(self, position_of: list[int]) -> None:
        self._position_of = position_of  # shared by queues that never hold one grain at the same time
        self._entries: deque[int] = deque()
        self._base = 0  # position of the first entry
        self.size = 0

    def push(self, grain: int) -> None:
        """Enter at the young end."""
        self._position_of[grain] = self._base + len(self._entries)
        self._entries.append(grain)
        self.size += 1

    def pop(self) -> int:
        """Leave at the old end; the queue must not be empty."""
        while True:
            grain = self._entries.popleft()
            position = self._base
            self._base += 1
            if self._position_of[grain] == position:
                self._position_of[grain] = -1
                self.size -= 1
                return grain

    def leave(self, grain: int) -> None:
        """Take a grain of this queue out, wherever it stands."""
        self._position_of[grain] = -1
        self.size -= 1
        if len(self._entries) > 2 * self.size + 1024:
            self._weed()

    def _weed(self) -> None:
        kept = [g for p, g in enumerate(self._entries, self._base) if self._position_of[g] == p]
        self._base += len(self._entries)  # positions never repeat, so a stale one cannot become true again
        self._entries = deque(kept)
        for position, grain in enumerate(kept, self._base):
            self._position_of[grain] = position


class ObjectPolicy:
    """What the object policies share: residency flags, the chain verbs, and one reference at a time for misses.

    A subclass keeps `_state[grain] > 0` for residents only and implements `_hit`, `_miss` (which makes room first)
    and `_evict_one` (which returns the grain, or -1 if nothing was evicted yet).
    """

    def __init__(self, capacity: int, grains_max: int) -> None:
        self._capacity = capacity
        self._state = bytearray(grains_max)
        self._states = np.frombuffer(self._state, np.uint8)
        self._live = 0
        self._gone: list[int] = []

    @property
    def live(self) -> int:
        """Resident grains."""
        return self._live

    def lookup(self, chain: Chain, now_us: int) -> int:
        """Leading resident grains of the chain; changes nothing."""
        return leading(self._states[chain] > 0)

    def touch(self, chain: Chain, now_us: int) -> None:
        """A read used these resident grains."""
        self._hits(chain)

    def insert(self, chain: Chain, now_us: int) -> Chain:
        """A whole chain was written, grain by grain; returns evicted ids (which may have come back since)."""
        self.serve(chain, now_us)
        gone, self._gone = self._gone, []
        return np.array(gone, np.int32) if gone else NOBODY

    def evict(self, count: int) -> Chain:
        """Let `count` grains go, fewer if there are not as many; returns their ids."""
        kept = max(0, self._live - count)
        while self._live > kept:
            self._evict_one()
        gone, self._gone = self._gone, []
        return np.array(gone, np.int32) if gone else NOBODY

    def expire(self, now_us: int) -> Chain:
        """Nothing: these policies know no time."""
        return NOBODY

    def serve(self, chain: Chain, now_us: int) -> Served:
        """One request of a replay, grain by grain; `resident` counts each grain when its turn comes."""
        self._gone.clear()
        hits = resident = self.lookup(chain, now_us)
        if hits:
            self._hits(chain[:hits])
        state, hit, miss = self._state, self._hit, self._miss
        for grain in chain[hits:].tolist():
            if state[grain]:
                resident += 1
                hit(grain)
            else:
                miss(grain)
        return Served(hits, resident)

    def _hits(self, chain: Chain) -> None:
        for grain in chain.tolist():
            self._hit(grain)

    def _hit(self, grain: int) -> None:
        raise NotImplementedError

    def _miss(self, grain: int) -> None:
        raise NotImplementedError

    def _evict_one(self) -> None:
        raise NotImplementedError

    def _remove(self, grain: int) -> None:
        self._state[grain] = 0
        self._live -= 1
        self._gone.append(grain)


class Fifo(ObjectPolicy):
    """First in, first out; a hit changes nothing."""

    def __init__(self, capacity: int, grains_max: int) -> None:
        super().__init__(capacity, grains_max)
        self._queue: deque[int] = deque()

    def _hits(self, chain: Chain) -> None:
        pass

    def _hit(self, grain: int) -> None:
        pass

    def _miss(self, grain: int) -> None:
        if self._live >= self._capacity:
            self._evict_one()
        self._queue.append(grain)
        self._state[grain] = 1
        self._live += 1

    def _evict_one(self) -> None:
        self._remove(self._queue.popleft())


class Lfu(ObjectPolicy):
    """Least frequently used goes first; among equals the least recently used."""

    def __init__(self, capacity: int, grains_max: int) -> None:
        super().__init__(capacity, grains_max)
        self._uses = [0] * grains_max
        self._by_uses: dict[int, OrderedDict[int, None]] = {}
        self._least = 1

    def _hit(self, grain: int) -> None:
        uses = self._uses[grain]
        peers = self._by_uses[uses]
        del peers[grain]
        if not peers:
            del self._by_uses[uses]
            if self._least == uses:
                self._least += 1
        self._enter(grain, uses + 1)

    def _miss(self, grain: int) -> None:
        if self._live >= self._capacity:
            self._evict_one()
        self._state[grain] = 1
        self._live += 1
        self._least = 1
        self._enter(grain, 1)

    def _enter(self, grain: int, uses: int) -> None:
        self._uses[grain] = uses
        self._by_uses.setdefault(uses, OrderedDict())[grain] = None

    def _evict_one(self) -> None:
        peers = self._by_uses.get(self._least)
        if not peers:  # only after evictions without an insertion between them
            self._least = min(uses for uses, found in self._by_uses.items() if found)
            peers = self._by_uses[self._least]
        grain, _ = peers.popitem(last=False)
        if not peers:
            del self._by_uses[self._least]
        self._remove(grain)


class Sieve(ObjectPolicy):
    """A queue with a hand that walks from old to young, spares the visited once and takes the first unvisited."""

    def __init__(self, capacity: int, grains_max: int) -> None:
        super().__init__(capacity, grains_max)
        self._younger = [-1] * grains_max
        self._older = [-1] * grains_max
        self._youngest = self._oldest = self._hand = -1

    def _hits(self, chain: Chain) -> None:
        self._states[chain] = 2

    def _hit(self, grain: int) -> None:
        self._state[grain] = 2

    def _miss(self, grain: int) -> None:
        if self._live >= self._capacity:
            self._evict_one()
        self._older[grain], self._younger[grain] = self._youngest, -1
        if self._youngest >= 0:
            self._younger[self._youngest] = grain
        else:
            self._oldest = grain
        self._youngest = grain
        self._state[grain] = 1
        self._live += 1

    def _evict_one(self) -> None:
        grain = self._hand if self._hand >= 0 else self._oldest
        while self._state[grain] == 2:
            self._state[grain] = 1
            grain = self._younger[grain] if self._younger[grain] >= 0 else self._oldest
        older, younger = self._older[grain], self._younger[grain]
        self._hand = younger
        if older >= 0:
            self._younger[older] = younger
        else:
            self._oldest = younger
        if younger >= 0:
            self._older[younger] = older
        else:
            self._youngest = older
        self._remove(grain)


_SMALL, _MAIN = 1, 2


class S3Fifo(ObjectPolicy):
    """A small queue in front of a main one, and a ghost of what left the small one without two hits.

    Small 10 % and ghost 90 % of the capacity, two hits to be moved; until the first eviction a full small queue passes
    newcomers to the main one (libCacheSim's variant of Yang et al., SOSP'23).
    """

    def __init__(self, capacity: int, grains_max: int) -> None:
        super().__init__(capacity, grains_max)
        self._small_max = int(capacity * 0.1)
        self._main_max = capacity - self._small_max
        self._ghost_max = int(capacity * 0.9)
        if self._small_max < 2:
            raise ConfigError("policy.capacity", capacity, "is too small for S3-FIFO", "give 20 grains or more")
        self._uses = bytearray(grains_max)
        self._uses_of = np.frombuffer(self._uses, np.uint8)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost_position = [-1] * grains_max
        self._ghost = _Queue(self._ghost_position)
        self._has_evicted = False

    def _hits(self, chain: Chain) -> None:
        self._uses_of[chain] = np.minimum(self._uses_of[chain] + 1, 3)

    def _hit(self, grain: int) -> None:
        if self._uses[grain] < 3:
            self._uses[grain] += 1

    def _miss(self, grain: int) -> None:
        was_ghost = self._ghost_position[grain] >= 0
        if was_ghost:
            self._ghost.leave(grain)
        while self._live >= self._capacity:
            self._evict_one()
        passes = not self._has_evicted and len(self._small) >= self._small_max
        if was_ghost or passes:
            self._main.append(grain)
            self._state[grain] = _MAIN
        else:
            self._small.append(grain)
            self._state[grain] = _SMALL
        self._uses[grain] = 0
        self._live += 1

    def _evict_one(self) -> None:
        self._has_evicted = True
        if len(self._main) > self._main_max or not self._small:
            self._evict_main()
        else:
            self._evict_small()

    def _evict_small(self) -> None:
        """Move what was hit twice, until one that was not goes; it may be that all move and none goes."""
        while self._small:
            grain = self._small.popleft()
            if self._uses[grain] >= 2:
                self._uses[grain] = 0
                self._state[grain] = _MAIN
                self._main.append(grain)
                continue
            if self._ghost.size >= self._ghost_max:
                self._ghost.pop()
            self._ghost.push(grain)
            self._remove(grain)
            return

    def _evict_main(self) -> None:
        while self._main:
            grain = self._main.popleft()
            if not self._uses[grain]:
                self._remove(grain)
                return
            self._uses[grain] -= 1
            self._main.append(grain)
