"""Where the experts of all layers lie: which expert a place holds, and which places hold an expert."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Ints = NDArray[np.integer]

# The gate spreads a rank's tokens over the replicas with this stride (published gate kernel).
REPLICA_STRIDE = 23_333


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Tables of layers with equal shapes. Rank r holds places r * size .. (r + 1) * size - 1.

    experts: the expert of every place, int32 [layers, places]. places: the places of every expert, int32
    [layers, experts, width], -1 unused; their order is the order in which replicas are chosen. counts: replicas of
    every expert, int32 [layers, experts]. Arrays are read-only.
    """

    experts: Int32
    places: Int32
    counts: Int32
    ranks: int

    def __post_init__(self) -> None:
        for table in (self.experts, self.places, self.counts):
            table.setflags(write=False)

    @classmethod
    def of(cls, experts: Ints, ranks: int, expert_count: int, width: int | None = None) -> "Placement":
        """The placement with these experts [layers, places]; an expert's places ascend.

        `width` of the table of places: by default what no placement of this shape without twins exceeds.
        """
        layers, count = experts.shape
        if width is None:
            width = min(count - expert_count + 1, ranks)
        rows = np.arange(layers)[:, None]
        flat = (experts + rows * expert_count).ravel()
        counts = np.bincount(flat, minlength=layers * expert_count)
        order = np.argsort(flat, kind="stable")
        # The n-th of an expert's places, for all places in order of layer, expert, place.
        nth = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.full((layers * expert_count, max(width, int(counts.max()))), -1, dtype=np.int32)
        places[flat[order], nth] = order % count
        return cls(
            np.array(experts, dtype=np.int32),
            places.reshape(layers, expert_count, -1),
            counts.astype(np.int32).reshape(layers, expert_count),
            ranks,
        )

    @classmethod
    def start(cls, layers: int, experts: int, extra: int, ranks: int) -> "Placement":
        """Before anything is known: experts in order, then copies of 0, 1, 2, … (twins lie `experts` places apart)."""
        check_shape(experts, extra, ranks)
        row = np.arange(experts + extra) % experts
        return cls.of(np.broadcast_to(row, (layers, len(row))), ranks, experts)

    @property
    def size(self) -> int:
        """Places of a rank."""
        return int(self.experts.shape[1]) // self.ranks

    @property
    def layers(self) -> int:
        """Layers that share this balancer."""
        return len(self.experts)

    @property
    def expert_count(self) -> int:
        """Logical experts of a layer."""
        return int(self.counts.shape[1])

    def with_layers(self, other: "Placement", layers: Sequence[int]) -> "Placement":
        """This placement with some layers as `other`, of the same shape, has them."""
        width = max(self.places.shape[2], other.places.shape[2])
        mine, theirs = (
            np.pad(one.places, ((0, 0), (0, 0), (0, width - one.places.shape[2])), constant_values=-1)
            for one in (self, other)
        )
        tables = [self.experts.copy(), mine, self.counts.copy()]
        for table, new in zip(tables, (other.experts, theirs, other.counts), strict=True):
            table[list(layers)] = new[list(layers)]
        return Placement(tables[0], tables[1], tables[2], self.ranks)

    def by_rank(self) -> Int32:
        """The same experts as [layers, ranks, places of a rank]."""
        return self.experts.reshape(self.layers, self.ranks, self.size)

    def twins(self) -> list[tuple[int, int, int]]:
        """(layer, rank, expert) wherever a rank holds an expert more than once."""
        held = np.sort(self.by_rank(), axis=-1)
        where = np.argwhere(held[..., 1:] == held[..., :-1])
        return sorted({(int(la), int(r), int(held[la, r, at])) for la, r, at in where})

    def check(self, allows_twins: bool = False) -> None:
        """Assert every invariant, re-derived: tables agree, no expert is lost, no rank holds one twice."""
        layers, count = self.experts.shape
        assert count % self.ranks == 0, f"{count} places must divide evenly over {self.ranks} ranks"
        assert self.experts.min() >= 0, f"a place holds expert {self.experts.min()}"
        assert self.experts.max() < self.expert_count, f"a place holds expert {self.experts.max()}"
        for layer in range(layers):
            held = np.bincount(self.experts[layer], minlength=self.expert_count)
            assert held.min() > 0, f"layer {layer}: expert {held.argmin()} has no place"
            assert np.array_equal(held, self.counts[layer]), f"layer {layer}: counts differ from the places"
        is_used = np.arange(self.places.shape[2]) < self.counts[..., None]
        assert np.array_equal(self.places >= 0, is_used), "an expert's places must come first in its row, then -1"
        of_layer, of_expert, nth = np.nonzero(is_used)
        named = self.places[of_layer, of_expert, nth]
        assert np.array_equal(self.experts[of_layer, named], of_expert), "an expert's row names a place of another"
        # Rows name as many places as there are, so if none is named twice, none is left out.
        assert len(np.unique(of_layer * count + named)) == layers * count, "a place is named twice"
        assert allows_twins or not self.twins(), f"twins (layer, rank, expert): {self.twins()[:5]}"


def check_shape(experts: int, extra: int, ranks: int) -> None:
    """Raise ValueError unless `experts + extra` places fit `ranks` evenly and without twins."""
    if experts < 1 or extra < 0 or ranks < 1 or (experts + extra) % ranks:
        raise ValueError(
            f"experts = {experts} + extra = {extra} must be a multiple of ranks = {ranks}; "
            f"use extra = {extra_places(max(experts, 1), max(extra, 0), max(ranks, 1))}"
        )
    if experts + extra > experts * ranks:
        raise ValueError(f"extra = {extra} must be at most {experts * (ranks - 1)}: a rank holds an expert once")


def extra_places(experts: int, minimum: int, ranks: int) -> int:
    """The smallest number of extra places, at least `minimum`, with which all places divide evenly over the ranks."""
    return minimum + -(experts + minimum) % ranks


def replica_index(ep_rank: int, tokens: Ints, counts: Ints) -> NDArray[np.int64]:
    """Which replica of its expert each token goes to: (ep_rank + token index * 23333) mod replicas, elementwise."""
    chosen: NDArray[np.int64] = (ep_rank + tokens.astype(np.int64) * REPLICA_STRIDE) % counts
    return chosen
