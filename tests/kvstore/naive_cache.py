"""Caches written from the golden file's definitions alone, one block at a time, to compare the policy core with."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

Stream = Sequence[tuple[int, list[int]]]  # (time, ids of the request's blocks)


def leading(ids: list[int], is_resident: Callable[[int], bool]) -> int:
    for count, block in enumerate(ids):
        if not is_resident(block):
            return count
    return len(ids)


def lru(stream: Stream, capacity: int, tail_first: bool) -> tuple[list[int], int]:
    """(hits of each request, resident blocks over all requests) in two phases: look up, then touch all."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, resident = [], 0
    for _, ids in stream:
        hits.append(leading(ids, cache.__contains__))
        resident += sum(block in cache for block in ids)
        for block in reversed(ids) if tail_first else ids:
            if block in cache:
                cache.move_to_end(block)
                continue
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = None
    return hits, resident


def lru_sequential(stream: Stream, capacity: int) -> tuple[list[int], int]:
    """The same with look-up and insertion block by block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, resident = [], 0
    for _, ids in stream:
        found = []
        for block in ids:
            found.append(block in cache)
            if found[-1]:
                cache.move_to_end(block)
                continue
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = None
        resident += sum(found)
        hits.append(found.index(False) if False in found else len(found))
    return hits, resident


def ttl(stream: Stream, ttl_us: int, sliding: bool) -> tuple[list[int], int, float]:
    """(hits of each request, peak of live blocks just after a request, their mean over time)."""
    since: dict[int, int] = {}
    hits, peak, area = [], 0, 0
    end = stream[-1][0]
    for now, ids in stream:
        hits.append(leading(ids, lambda block, now=now: block in since and now - since[block] <= ttl_us))
        for block in ids:
            alive = block in since and now - since[block] <= ttl_us
            if sliding or not alive:
                if block in since:
                    area += min(now - since[block], ttl_us)
                since[block] = now
        peak = max(peak, sum(now - at <= ttl_us for at in since.values()))
    area += sum(min(end - at, ttl_us) for at in since.values())
    return hits, peak, area / (end - stream[0][0])
