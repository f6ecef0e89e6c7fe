"""Deliberately simple opponents of the expert policy, and the measure all are held to."""

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.statistics import rank_loads


def peaks(placement: Placement, loads: NDArray[np.integer]) -> NDArray[np.float64]:
    """Sum over steps of the busiest rank's load, for each layer."""
    sums: NDArray[np.float64] = rank_loads(placement, loads).max(-1).sum(0)
    return sums


def naive(loads: NDArray[np.integer], ranks: int, extra: int) -> Placement | None:
    """Replicas to the largest share, places heaviest first to the lightest free rank without a twin; totals alone.

    None where it runs into a corner: the only free ranks hold the expert already.
    """
    experts = loads.shape[2]
    size = (experts + extra) // ranks
    rows = []
    for totals in loads.sum(0).tolist():
        counts = [1] * experts
        for _ in range(extra):
            free = [e for e in range(experts) if counts[e] < ranks]
            counts[max(free, key=lambda e: totals[e] / counts[e])] += 1
        places = sorted(((totals[e] / counts[e], e) for e in range(experts) for _ in range(counts[e])), reverse=True)
        held: list[list[int]] = [[] for _ in range(ranks)]
        sums = [0.0] * ranks
        for load, expert in places:
            free = [r for r in range(ranks) if len(held[r]) < size and expert not in held[r]]
            if not free:
                return None
            rank = min(free, key=lambda r: sums[r])
            held[rank].append(expert)
            sums[rank] += load
        rows.append([expert for one in held for expert in one])
    return Placement.of(np.array(rows), ranks, experts)
