"""Deliberately simple opponents of the expert policy, and the measure all are held to."""

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.statistics import rank_loads


def peaks(placement: Placement, loads: NDArray[np.integer]) -> NDArray[np.float64]:
    """Sum over steps of the busiest rank's load, for each layer."""
    sums: NDArray[np.float64] = rank_loads(placement, loads).max(-1).sum(0)
    return sums


def published_layer(tokens: list[list[int]], ranks: int, extra: int) -> tuple[list[int], list[int]]:
    """The published rules for one layer, word for word: (expert of every place, replicas of every expert)."""
    experts = len(tokens[0])
    weighted = [[count + 1e-4 * expert for expert, count in enumerate(step)] for step in tokens]
    counts, copies = [1] * experts, []

    def peak(step: list[float], more: int) -> float:
        each = [load / count for load, count in zip(step, counts, strict=True)]
        if more != each.index(max(each)):
            return max(each)
        each[more] = step[more] / (counts[more] + 1)
        return max(each)

    for _ in range(extra):
        sums = [sum(peak(step, expert) for step in weighted) for expert in range(experts)]
        copies.append(min(range(experts), key=lambda expert: sums[expert]))
        counts[copies[-1]] += 1
    places = [*range(experts), *copies]
    size = len(places) // ranks
    if size == 1:
        return places, counts
    each = [[step[expert] / counts[expert] for step in weighted] for expert in places]
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [[0.0] * len(weighted) for _ in range(ranks)]
    so_far = [0.0] * len(weighted)
    for place in sorted(range(len(places)), key=lambda place: -sum(each[place])):
        after = [
            [max(p, a + b) for p, a, b in zip(so_far, loads[r], each[place], strict=True)]
            if len(held[r]) < size
            else []
            for r in range(ranks)
        ]
        sums = [sum(steps) for steps in after]
        rank = min((r for r in range(ranks) if after[r]), key=sums.__getitem__)
        so_far = after[rank]
        loads[rank] = [a + b for a, b in zip(loads[rank], each[place], strict=True)]
        held[rank].append(places[place])
    return [expert for one in held for expert in one], counts


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
