"""ARC behind the chain verbs: two recency lists with ghosts, and a target between them that adapts; pure.

After Megiddo and Modha (FAST'03). The target moves by fractions, as in libCacheSim 0.3.5, whose counts the golden file
holds.
"""

from shoal.kvstore.core.policy.queues import ObjectPolicy, _Queue

_ONCE, _OFTEN = 1, 2  # resident lists
_ONCE_GHOST, _OFTEN_GHOST = 1, 2


class Arc(ObjectPolicy):
    """Grains used once and grains used often, each in order of use, each followed by the ghosts of what left it."""

    def __init__(self, capacity: int, grains_max: int) -> None:
        super().__init__(capacity, grains_max)
        position_of = [-1] * grains_max
        self._ghost_state = bytearray(grains_max)
        self._once, self._often = _Queue(position_of), _Queue(position_of)
        self._once_ghost, self._often_ghost = _Queue(position_of), _Queue(position_of)
        self._target = 0.0  # grains that the list of those used once may keep

    def _hit(self, grain: int) -> None:
        (self._once if self._state[grain] == _ONCE else self._often).leave(grain)
        self._state[grain] = _OFTEN
        self._often.push(grain)

    def _miss(self, grain: int) -> None:
        ghost = self._ghost_state[grain]
        once, often = self._once_ghost, self._often_ghost
        if ghost == _ONCE_GHOST:
            self._target = min(self._target + max(often.size / once.size, 1.0), self._capacity)
            once.leave(grain)
        elif ghost == _OFTEN_GHOST:
            self._target = max(self._target - max(once.size / often.size, 1.0), 0.0)
            often.leave(grain)
        if self._live >= self._capacity:
            if ghost:
                self._replace(ghost == _OFTEN_GHOST)
            else:
                self._evict_one()
        self._ghost_state[grain] = 0
        self._state[grain] = _OFTEN if ghost else _ONCE
        (self._often if ghost else self._once).push(grain)
        self._live += 1

    def _evict_one(self) -> None:
        once, ghosts = self._once.size, self._once_ghost.size
        if once + ghosts >= self._capacity:
            if once >= self._capacity:
                self._remove(self._once.pop())
                return
            self._ghost_state[self._once_ghost.pop()] = 0
        elif self._live + ghosts + self._often_ghost.size >= 2 * self._capacity:
            self._ghost_state[self._often_ghost.pop()] = 0
        self._replace(False)

    def _replace(self, for_often_ghost: bool) -> None:
        size = self._once.size
        takes_once = size > 0 and (size > self._target or (size == self._target and for_often_ghost))
        if takes_once or not self._often.size:
            grain = self._once.pop()
            self._once_ghost.push(grain)
            self._ghost_state[grain] = _ONCE_GHOST
        else:
            grain = self._often.pop()
            self._often_ghost.push(grain)
            self._ghost_state[grain] = _OFTEN_GHOST
        self._remove(grain)
