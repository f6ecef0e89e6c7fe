"""The open engine's policy: greedy replicas, then greedy packing. It may put twins on a rank.

Ours is in `policy`; this one is what recorded placements come from, and the opponent in the benchmark.
"""

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Placement

# Breaks ties in favour of later experts, small against one token for a few hundred of them.
TIE_TOKENS = 1e-4


def solve_published(loads: NDArray[np.integer], ranks: int, extra: int) -> Placement:
    """The placement for `loads`, tokens received [steps, layers, experts] summed over ranks; layers by themselves.

    Costs steps x places x ranks for each layer.
    """
    rows = [_solve_layer(loads[:, layer], ranks, extra) for layer in range(loads.shape[1])]
    experts, places, counts = (np.stack(table).astype(np.int32) for table in zip(*rows, strict=True))
    return Placement(experts, places, counts, ranks)


def _solve_layer(
    tokens: NDArray[np.integer], ranks: int, extra: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    expert_count = tokens.shape[1]
    weighted = tokens + TIE_TOKENS * np.arange(expert_count)
    copies, counts = _replicas(weighted, extra)
    before = np.concatenate((np.arange(expert_count), copies))
    each = (weighted / counts)[:, before]
    order = np.arange(len(before)) if len(before) == ranks else _pack(each, ranks)
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    places = np.full((expert_count, extra + 1), -1, dtype=np.int64)
    for expert in range(expert_count):
        mine = moved[before == expert]
        places[expert, : len(mine)] = mine
    return before[order], places, counts


def _replicas(weighted: NDArray[np.float64], extra: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The expert of each copy, and replicas of every expert: each copy lowers the summed peaks of steps the most."""
    steps, expert_count = weighted.shape
    at = np.arange(steps)
    counts = np.ones(expert_count, dtype=np.int64)
    copies = np.empty(extra, dtype=np.int64)
    for turn in range(extra):
        each = weighted / counts
        top = each.argmax(1)
        peak = each[at, top]
        split = weighted[at, top] / (counts[top] + 1)
        each[at, top] = -np.inf
        lower = peak - np.maximum(each.max(1), split)
        # Another expert than the busiest changes nothing in a step, so a step speaks for its busiest one alone.
        copies[turn] = np.bincount(top, weights=lower, minlength=expert_count).argmax()
        counts[copies[turn]] += 1
    return copies, counts


def _pack(each: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Old places in their new order: heaviest first, each to the rank where the summed peaks of steps stay lowest."""
    steps, count = each.shape
    size = count // ranks
    loads = np.zeros((ranks, steps))
    peak = np.zeros(steps)
    held: list[list[int]] = [[] for _ in range(ranks)]
    is_full = np.zeros(ranks, dtype=bool)
    for place in np.argsort(-each.sum(0), kind="stable"):
        peaks = np.maximum(loads + each[:, place], peak)
        rank = int(np.where(is_full, np.inf, peaks.sum(1)).argmin())
        loads[rank] += each[:, place]
        peak = peaks[rank]
        held[rank].append(int(place))
        is_full[rank] = len(held[rank]) == size
    return np.array([place for places in held for place in places], dtype=np.int64)
