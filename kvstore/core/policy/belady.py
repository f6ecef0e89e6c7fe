"""Belady's MIN over a known future: the most hits that any policy of single objects could have; pure."""

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt


def belady_hits(grains: npt.NDArray[np.int32], capacity: int) -> int:
    """Object hits over a stream of grain ids when the one used again latest goes first; every miss is admitted.

    O(references * log(references)).
    """
    stream = grains.tolist()
    never = len(stream)
    next_use = [never] * len(stream)
    seen: dict[int, int] = {}
    for at in range(len(stream) - 1, -1, -1):
        next_use[at] = seen.get(stream[at], never)
        seen[stream[at]] = at
    uses_next: dict[int, int] = {}  # residents
    farthest: list[tuple[int, int]] = []  # (-next use, grain); stale once the grain was used again
    hits = 0
    for at, grain in enumerate(stream):
        if grain in uses_next:
            hits += 1
        elif len(uses_next) >= capacity:
            while True:
                use, victim = heappop(farthest)
                if uses_next.get(victim) == -use:
                    del uses_next[victim]
                    break
        uses_next[grain] = next_use[at]
        heappush(farthest, (-next_use[at], grain))
    return hits
