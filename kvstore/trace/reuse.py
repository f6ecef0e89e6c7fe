"""What a trace offers any cache: hits without limits, how long grains wait for their next use, and who is used most."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from shoal.kvstore.trace.packed import Trace

PERCENTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
LENGTH_PERCENTILES = (0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Under a cache that forgets nothing. Gaps and ages in microseconds, one count a hit block.

    `gaps`: since the grain's last use; `ages`: since it was first written. `hottest_share`: share of all hits that the
    hottest tenth of the grains make. `hits_of` int32 [requests].
    """

    gaps: Mapping[int, int]
    ages: Mapping[int, int]
    never_hit: int
    hottest_share: float
    hits_of: npt.NDArray[np.int32]


def measure_reuse(trace: Trace) -> Reuse:
    """One pass over the trace. O(references) plus, a request, its distinct gaps."""
    last = np.full(trace.grains_max, -1, np.int64)
    first = np.full(trace.grains_max, -1, np.int64)
    uses = np.zeros(trace.grains_max, np.int64)
    hits_of = np.zeros(len(trace), np.int32)
    gaps: Counter[int] = Counter()
    ages: Counter[int] = Counter()
    for at, (chain, now_us) in enumerate(zip(trace.chains(), trace.times_us.tolist(), strict=True)):
        before = last[chain]
        absent = before < 0
        hits = int(absent.argmax()) if absent.any() else len(chain)
        hits_of[at] = hits
        if hits:
            _count(gaps, now_us - before[:hits])
            _count(ages, now_us - first[chain[:hits]])
            uses[chain[:hits]] += 1
        first[chain[absent]] = now_us
        last[chain] = now_us
    hottest = np.sort(uses)[::-1][: len(uses) // 10]
    total = int(uses.sum())
    share = int(hottest.sum()) / total if total else 0.0
    return Reuse(gaps, ages, int(np.count_nonzero(uses == 0)), share, hits_of)


def percentile(counts: Mapping[int, int], shares: Sequence[float]) -> list[int]:
    """Nearest-rank percentiles of counted values: the value at place ceil(share * n) of the sorted list."""
    values = np.array(sorted(counts), np.int64)
    upto = np.cumsum(np.array([counts[value] for value in values.tolist()], np.int64))
    total = int(upto[-1]) if len(upto) else 0
    return [int(values[np.searchsorted(upto, max(1, rank(share, total)))]) for share in shares] if total else []


def rank(share: float, total: int) -> int:
    """ceil(share * total) without the error of a float product."""
    return -(-round(share * 10**6) * total // 10**6)


def lengths(values: npt.NDArray[np.int64]) -> Mapping[int, int]:
    """Values counted, for `percentile`."""
    unique, counts = np.unique(values, return_counts=True)
    return dict(zip(unique.tolist(), counts.tolist(), strict=True))


def _count(into: Counter[int], values: npt.NDArray[np.int64]) -> None:
    edges = np.flatnonzero(np.diff(values)) + 1  # a chain is mostly runs of one value: written or used together
    begins = np.concatenate((np.zeros(1, np.int64), edges))
    for value, count in zip(values[begins].tolist(), np.diff(np.append(begins, len(values))).tolist(), strict=True):
        into[value] += count
