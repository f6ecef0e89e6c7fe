"""Our policy: which experts get replicas and where every place goes, so that the busiest rank of a step is least busy.

Stages, each over all layers at once; no rank ever holds an expert twice:
1. Replicas: again and again the expert with the most tokens for each replica gets one more (`replicate`).
2. A first placement: the present one with just those replicas changed. Where that is far from balance it is dealt
   anew: places, heaviest first, in rounds of one a rank; the heaviest of a round goes to the rank with the least.
3. Exchange: in many small turns, ranks in pairs swap the two places whose swap makes the pair most alike. A swap that
   would hardly be noticed is not made, for it moves weights.
4. Polish, only where there are few places: any swap that lowers the sum of peaks itself, the best first.
A layer for which all that is no better than what it has now keeps what it has, and nothing of it moves.

What the exchange makes alike is not one total but a few *modes* of the window: the directions in which the loads of
its buckets vary most (their principal components, without centring, so that the first is close to the total). Experts
that are busy at the same time, because they serve the same kind of text, then come to lie on different ranks. Chance
falls away with the modes that are left out, which is why the result also suits the next window.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Ints, Placement
from shoal.engines.core.experts.replicate import replicas, with_replicas

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Slots = tuple[slice, slice]

# A window is summed into this many buckets; more of them cost time and show chance rather than traffic.
BUCKETS = 25
# Slots of a rank that one turn considers; where a rank has more, the next turn looks at others.
SLOTS_MAX = 12
# More than any squared load, in units of the mean load of an expert: such a swap is never the best.
FORBIDDEN = np.float32(1e12)
# Numbers that one step of polishing may compute for a layer (pairs of places x ranks x buckets): some milliseconds.
POLISH_MAX = 300_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the exchange looks for something better. Defaults: measured, `python -m shoal.engines.experts_bench`.

    `turns` where one turn sees every slot of a rank, `turns_many` where ranks have more slots than that. `unrest`
    multiplies all modes but the first: what varied within one window varies more from one window to the next. A swap
    must matter as much as one that takes the share `swap_min` of the mean load from a rank that has so much too many.
    Layers whose busiest rank has more than `deal_above` times the mean load are dealt anew.
    """

    modes: int = 8
    turns: int = 14
    turns_many: int = 28
    unrest: float = 2.0
    swap_min: float = 0.005
    deal_above: float = 1.3


def solve(loads: Ints, current: Placement, effort: Effort | None = None) -> Placement:
    """The placement to change to from `current` (of no twins) for loads like `loads`.

    loads: tokens received [steps or buckets of steps, layers, experts], summed over ranks. Deterministic: every rank
    that has the same loads computes the same placement. Raises ValueError for loads of another shape.
    """
    if loads.shape[1:] != current.counts.shape or not len(loads):
        raise ValueError(
            f"loads has shape {list(loads.shape)}, needs [steps, layers, experts] = [1 or more, "
            f"{current.layers}, {current.expert_count}] as the current placement has"
        )
    assert not current.twins(), f"twins (layer, rank, expert) before solving: {current.twins()[:5]}"
    effort = effort or Effort()
    ranks, extra = current.ranks, current.experts.shape[1] - current.expert_count
    buckets = in_buckets(loads)
    totals = buckets.sum(0, dtype=np.float64)
    counts = replicas(totals, extra, ranks)
    first = _first_placement(current, counts, totals, effort.deal_above)
    modes = in_modes(buckets, effort.modes)
    modes[1:] *= effort.unrest
    # Squared, in the units of the modes, whose first is the square root of the number of buckets times the mean.
    gain_min = len(buckets) * (effort.swap_min * current.expert_count / ranks) ** 2
    placed = exchange(first, (modes / counts).astype(np.float32), effort, gain_min)
    each = (buckets / counts).astype(np.float32)
    if placed[0].size ** 2 * ranks * len(buckets) <= POLISH_MAX:
        placed = np.stack([polish(placed[layer], each[:, layer]) for layer in range(len(placed))])
    before = peaks(current.by_rank(), (buckets / current.counts).astype(np.float32))
    is_better = peaks(placed, each) < before
    chosen = np.where(is_better[:, None, None], placed, current.by_rank())
    return Placement.of(chosen.reshape(len(chosen), -1), ranks, current.expert_count)


def _first_placement(current: Placement, counts: Int64, totals: Float64, deal_above: float) -> Int32:
    each = totals / counts
    placed, is_usable = with_replicas(current, counts, each)
    loads = each[np.arange(len(placed))[:, None, None], placed].sum(-1)
    is_usable &= loads.max(1) <= deal_above * loads.mean(1)
    if not is_usable.all():
        placed[~is_usable] = deal(*by_weight(totals[~is_usable], counts[~is_usable]), current.ranks)
    return placed


def in_buckets(loads: Ints) -> Ints:
    """The window as sums of at most BUCKETS parts of it, in order."""
    if len(loads) <= BUCKETS:
        return loads
    return np.add.reduceat(loads, np.arange(BUCKETS) * len(loads) // BUCKETS, axis=0, dtype=np.int64)


def in_modes(buckets: Ints, modes: int) -> Float32:
    """The window in its main directions [modes, layers, experts], in units of the mean load; the strongest first.

    Layers share the directions, for what changes with time is the text, and all layers see the same text.
    """
    flat = buckets.reshape(len(buckets), -1).astype(np.float32)
    flat /= max(float(flat.mean()), 1e-30)
    _, directions = np.linalg.eigh(flat @ flat.T)
    return (directions[:, ::-1][:, :modes].T @ flat).reshape(-1, *buckets.shape[1:])


def by_weight(totals: Float64, counts: Int64) -> tuple[Int32, Float64]:
    """The expert of every place and its load, both [layers, places], heaviest first; an expert's replicas adjoin."""
    layers, experts = totals.shape
    names = np.tile(np.arange(experts, dtype=np.int32), layers)
    places = np.repeat(names, counts.ravel()).reshape(layers, -1)
    weights = np.take_along_axis(totals / counts, places, 1)
    order = np.argsort(-weights, axis=1, kind="stable")
    return np.take_along_axis(places, order, 1), np.take_along_axis(weights, order, 1)


def deal(places: Int32, weights: Float64, ranks: int) -> Int32:
    """Experts [layers, ranks, places of a rank]: each round gives every rank one place, the heaviest to the lightest.

    Replicas adjoin in `places` and are at most `ranks`, so an expert meets at most two rounds. Those left for the
    second go to the lightest ranks without the expert; there are enough of them.
    """
    layers, count = places.shape
    dealt = np.empty((layers, ranks, count // ranks), dtype=np.int32)
    loads = np.zeros((layers, ranks))
    rows = np.arange(layers)[:, None]
    for slot in range(count // ranks):
        items = places[:, slot * ranks : (slot + 1) * ranks]
        order = np.argsort(loads, axis=1, kind="stable")
        if slot:
            is_left = (items == items[:, :1]) & (items[:, :1] == places[:, slot * ranks - 1, None])
            has_it = (dealt[:, :, slot - 1] == items[:, :1]) & is_left[:, :1]
            is_taken = np.zeros((layers, ranks), dtype=bool)
            np.put_along_axis(is_taken, np.lexsort((loads, has_it), axis=1), is_left, 1)
            order = np.lexsort((loads, ~is_taken), axis=1)
        dealt[rows, order, slot] = items
        loads[rows, order] += weights[:, slot * ranks : (slot + 1) * ranks]
    return dealt


def exchange(dealt: Int32, each: Float32, effort: Effort, gain_min: float) -> Int32:
    """Swap places between paired ranks for some turns; experts [layers, ranks, places of a rank].

    each: modes of one replica's load [modes, layers, experts]. Every swap lowers the squared loads, summed over ranks
    and modes, by more than twice `gain_min`. A rank of a layer is a column here: arrays end in layers x ranks, so that
    each step is one operation.
    """
    layers, ranks, size = dealt.shape
    columns = _Columns(dealt, each)
    first = np.arange(layers)[:, None] * ranks
    turns = effort.turns if size <= SLOTS_MAX else effort.turns_many
    for turn in range(turns if ranks > 1 else 0):
        # Every second pairing is by the first mode, the others by the rest in turn; the first turns are coarse work.
        mode = 0 if turn < 3 or turn % 2 == 0 else 1 + turn // 2 % max(len(each) - 1, 1)
        order = np.argsort(columns.sums[mode % len(each)].reshape(layers, ranks), axis=1) + first
        light, heavy = order[:, : ranks // 2], order[:, ::-1][:, : ranks // 2]
        columns.swap((heavy.ravel(), light.ravel()), _slots(turn, size), gain_min)
    return columns.experts.T.reshape(layers, ranks, size)


def polish(placed: Int32, each: Float32) -> Int32:
    """Swap two places of one layer as long as that lowers the sum of peaks; experts [ranks, places of a rank].

    each: one replica's load [buckets, experts].
    """
    ranks, size = placed.shape
    experts = placed.ravel().copy()
    rank_of = np.repeat(np.arange(ranks), size)
    other, mine = np.nonzero(rank_of[:, None] < rank_of)
    at = np.arange(len(mine))
    for _ in range(len(experts)):
        held = np.zeros((ranks, each.shape[1]), dtype=bool)
        held[rank_of, experts] = True
        sums = each[:, experts].reshape(len(each), ranks, size).sum(-1)
        change = (each[:, experts[other]] - each[:, experts[mine]]).T
        after = np.repeat(sums.T[None], len(mine), axis=0)
        after[at, rank_of[mine]] += change
        after[at, rank_of[other]] -= change
        totals = after.max(1).sum(-1)
        totals[held[rank_of[mine], experts[other]] | held[rank_of[other], experts[mine]]] = np.inf
        best = int(totals.argmin()) if len(totals) else 0
        if not len(totals) or totals[best] >= sums.max(1).sum() * (1 - 1e-6):
            break
        experts[[mine[best], other[best]]] = experts[[other[best], mine[best]]]
    return experts.reshape(ranks, size)


def peaks(placed: Int32, each: Float32) -> Float32:
    """Sum over buckets of the busiest rank's load, by layer; each: one replica's load [buckets, layers, experts]."""
    rows = np.arange(len(placed))[:, None, None]
    sums: Float32 = each[:, rows, placed].sum(-1).max(-1).sum(0)
    return sums


def _slots(turn: int, size: int) -> Slots:
    """The slots that a turn considers, of the heavier and of the lighter rank of a pair."""
    parts = -(-size // SLOTS_MAX)
    firsts = (min(at % parts * SLOTS_MAX, max(size - SLOTS_MAX, 0)) for at in (turn, turn // parts))
    heavy, light = (slice(first, min(first + SLOTS_MAX, size)) for first in firsts)
    return heavy, light


class _Columns:
    """Experts [slots, columns], their loads [modes, slots, columns] and the columns' sums [modes, columns].

    `holds` [columns x experts] says whether a column holds an expert.
    """

    def __init__(self, dealt: Int32, each: Float32) -> None:
        layers, ranks, size = dealt.shape
        self.experts = np.ascontiguousarray(dealt.reshape(-1, size).T)
        self.loads = np.ascontiguousarray(each[:, np.repeat(np.arange(layers), ranks), self.experts])
        self.sums = self.loads.sum(1)
        self.holds = np.zeros((layers * ranks, each.shape[2]), dtype=bool)
        self.holds[np.arange(layers * ranks), self.experts] = True

    def swap(self, pairs: tuple[Int64, Int64], slots: Slots, gain_min: float) -> None:
        """Make the best swap of each pair of columns (no column in two pairs), if it gains more than `gain_min`.

        With d = yours - mine and D = my sum - your sum, a swap adds 2 (|d|^2 + d.D) to the squares. Taken apart, that
        is a term of my slot, a term of yours and one product, the only part to be computed for pairs of slots.
        """
        left, right = pairs
        mine, yours = (self.loads[:, s].take(p, axis=2) for s, p in zip(slots, pairs, strict=True))
        names, others = (self.experts[s].take(p, axis=1) for s, p in zip(slots, pairs, strict=True))
        apart = (self.sums[:, left] - self.sums[:, right])[:, None]
        give = (mine * (mine - apart)).sum(0)
        take = (yours * (yours + apart)).sum(0)
        give[self.holds[right, names]] = FORBIDDEN
        take[self.holds[left, others]] = FORBIDDEN
        change = give[:, None] + take[None]
        product = np.empty_like(change)
        mine *= 2
        for mode in range(len(self.loads)):
            change -= np.multiply(mine[mode][:, None], yours[mode][None], out=product)
        flat = change.reshape(-1, len(left))
        best = flat.argmin(0)
        is_good = flat[best, np.arange(len(left))] < -gain_min
        give_slot, take_slot = np.divmod(best[is_good], len(take))
        self._swap((give_slot + slots[0].start, left[is_good]), (take_slot + slots[1].start, right[is_good]))

    def _swap(self, here: tuple[Int64, Int64], there: tuple[Int64, Int64]) -> None:
        mine, yours = self.loads[:, *here], self.loads[:, *there]
        name, other = self.experts[here], self.experts[there]
        self.loads[:, *here], self.loads[:, *there] = yours, mine
        self.experts[here], self.experts[there] = other, name
        for column, change, gone, come in ((here[1], yours - mine, name, other), (there[1], mine - yours, other, name)):
            self.sums[:, column] += change
            self.holds[column, gone] = False
            self.holds[column, come] = True
