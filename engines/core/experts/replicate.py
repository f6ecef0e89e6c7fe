"""How many replicas each expert gets, and the present placement with just those replicas changed."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Placement

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
VACANT = -1


def replicas(totals: Float64, extra: int, ranks: int) -> Int64:
    """Replicas of each expert [layers, experts]: one each and `extra` more, at most one a rank.

    Each further one goes to the expert with the most tokens for each replica.
    """
    layers = np.arange(len(totals))
    counts = np.ones(totals.shape, dtype=np.int64)
    # A little for everybody: without tokens, replicas spread over the experts.
    totals = totals + max(float(totals.mean()), 1.0) * 1e-6
    each = totals.copy()
    for _ in range(extra):
        most = each.argmax(1)
        counts[layers, most] += 1
        have = counts[layers, most]
        each[layers, most] = np.where(have < ranks, totals[layers, most] / have, -1.0)
    return counts


def with_replicas(current: Placement, counts: Int64, each: Float64) -> tuple[Int32, NDArray[np.bool_]]:
    """`current` with as many replicas as `counts` says, all other places untouched, and which layers that worked for.

    A replica too many goes from the busiest of its ranks; the heaviest missing one comes first, to the least busy rank
    that has room and does not hold it. Experts [layers, ranks, places of a rank]; each: one replica's load [layers,
    experts]. A layer fails, and its places mean nothing, where only ranks have room that hold the expert already.
    """
    state = _State(current.by_rank().copy(), each)
    change = counts - current.counts
    is_done = np.ones(len(counts), dtype=bool)
    for rows, experts in _columns(-change, each):
        loads = np.where(state.holds[rows, :, experts], state.loads[rows], -np.inf)
        state.take(rows, loads.argmax(1), experts)
    for rows, experts in _columns(change, each):
        has_room = (state.placed[rows] == VACANT).any(-1)
        loads = np.where(has_room & ~state.holds[rows, :, experts], state.loads[rows], np.inf)
        ranks = loads.argmin(1)
        for at in np.flatnonzero(~np.isfinite(loads.min(1))):
            ranks[at] = state.make_room(int(rows[at]), int(experts[at]))
        fits = ranks >= 0
        is_done[rows[~fits]] = False
        state.put(rows[fits], ranks[fits], experts[fits])
    return state.placed, is_done


def _columns(wanted: Int64, each: Float64) -> Iterator[tuple[Int64, Int64]]:
    """The first expert wanted in every layer that wants one, then the second, …: (layers, experts), heaviest first."""
    wanted = wanted.clip(0)
    of_layer, of_expert = np.nonzero(wanted)
    times = wanted[of_layer, of_expert]
    layers, experts = np.repeat(of_layer, times), np.repeat(of_expert, times)
    order = np.lexsort((experts, -each[layers, experts], layers))
    layers, experts = layers[order], experts[order]
    firsts = np.searchsorted(layers, layers)
    nth = np.arange(len(layers)) - firsts
    for turn in range(int(nth.max()) + 1 if len(nth) else 0):
        yield layers[nth == turn], experts[nth == turn]


class _State:
    """Places being filled: experts [layers, ranks, slots], who holds what [layers, ranks, experts], ranks' loads."""

    def __init__(self, placed: Int32, each: Float64) -> None:
        layers, ranks, _ = placed.shape
        rows = np.arange(layers)[:, None, None]
        self.placed, self.each = placed, each
        self.loads = each[rows, placed].sum(-1)
        self.holds = np.zeros((layers, ranks, each.shape[1]), dtype=bool)
        self.holds[rows, np.arange(ranks)[:, None], placed] = True

    def take(self, rows: Int64, ranks: Int64, experts: Int64) -> None:
        """Make the places of these experts vacant; each layer at most once."""
        slots = (self.placed[rows, ranks] == experts[:, None]).argmax(1)
        self.placed[rows, ranks, slots] = VACANT
        self.holds[rows, ranks, experts] = False
        self.loads[rows, ranks] -= self.each[rows, experts]

    def put(self, rows: Int64, ranks: Int64, experts: Int64) -> None:
        """Fill the first vacant place of these ranks; each layer at most once."""
        slots = (self.placed[rows, ranks] == VACANT).argmax(1)
        self.placed[rows, ranks, slots] = experts
        self.holds[rows, ranks, experts] = True
        self.loads[rows, ranks] += self.each[rows, experts]

    def make_room(self, row: int, expert: int) -> int:
        """Move some other expert into a vacant place so that a rank without `expert` has room: that rank, or -1."""
        vacant = np.flatnonzero((self.placed[row] == VACANT).any(-1))
        for rank in np.argsort(self.loads[row], kind="stable"):
            if self.holds[row, rank, expert]:
                continue
            for other in vacant:
                movable = [e for e in self.placed[row, rank] if not self.holds[row, other, e]]
                if movable:
                    one, moved = np.array([row]), np.array(movable[:1], dtype=np.int64)
                    self.take(one, np.array([rank]), moved)
                    self.put(one, np.array([other]), moved)
                    return int(rank)
        return -1
