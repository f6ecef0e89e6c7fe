"""Which weights go where when a placement is replaced: transfers between ranks, copies inside one.

Every rank computes the whole plan from the two placements, so sender and receiver agree without a word: `sends` of
one rank to another and `receives` of the other from the first are the same moves in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.engines.core.experts.placement import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """An expert of a layer goes from a place of the old placement to a place, on another rank, of the new one."""

    layer: int
    expert: int
    sender: int
    source: int
    receiver: int
    target: int


@dataclass(frozen=True, slots=True)
class Copy:
    """An expert goes to another place of its own rank; `is_received`: `source` is where a transfer of it arrives.

    Other sources are places of the old placement, which a move may overwrite: read them before anything is replaced.
    """

    layer: int
    expert: int
    rank: int
    source: int
    target: int
    is_received: bool


@dataclass(frozen=True, slots=True)
class MovePlan:
    """All moves, by layer; places that no move names keep their expert."""

    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank sends, in order."""
        return tuple(t for t in self.transfers if t.sender == rank)

    def receives(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank receives, in order."""
        return tuple(t for t in self.transfers if t.receiver == rank)

    def copies_of(self, rank: int) -> tuple[Copy, ...]:
        """What a rank copies, in order."""
        return tuple(c for c in self.copies if c.rank == rank)

    def check(self, old: Placement, new: Placement) -> None:
        """Assert that the plan, and nothing but it, turns `old` into `new`, and that no rank receives what it has."""
        held = old.experts.copy()
        arrived: dict[tuple[int, int, int], int] = {}
        targets: set[tuple[int, int]] = set()
        for move in self.transfers:
            assert old.experts[move.layer, move.source] == move.expert, f"{move}: the source holds another expert"
            assert move.source // old.size == move.sender, f"{move}: the source is not the sender's"
            assert move.target // new.size == move.receiver != move.sender, f"{move}: the target is not the receiver's"
            mine = old.experts[move.layer, move.receiver * old.size : (move.receiver + 1) * old.size]
            assert move.expert not in mine, f"{move}: the receiver has this expert"
            key = (move.layer, move.receiver, move.expert)
            assert key not in arrived, f"{move}: the receiver gets this expert twice"
            arrived[key] = move.target
        for copy in self.copies:
            assert copy.source // old.size == copy.target // new.size == copy.rank, f"{copy}: leaves its rank"
            if copy.is_received:
                key = (copy.layer, copy.rank, copy.expert)
                assert arrived.get(key) == copy.source, f"{copy}: nothing arrives at the source"
            else:
                assert old.experts[copy.layer, copy.source] == copy.expert, f"{copy}: the source holds another expert"
        moves: tuple[Transfer | Copy, ...] = (*self.transfers, *self.copies)
        for one in moves:
            place = (one.layer, one.target)
            assert place not in targets, f"{one}: the target is written twice"
            assert held[place] != one.expert, f"{one}: the target has this expert"
            targets.add(place)
            held[place] = one.expert
        assert (held == new.experts).all(), "places without a move do not hold what the new placement says"


def plan_moves(old: Placement, new: Placement, layers: Sequence[int] | None = None) -> MovePlan:
    """The moves from `old` to `new`, placements of one shape, of some layers or of all. The same on every rank."""
    if old.experts.shape != new.experts.shape or old.ranks != new.ranks or old.expert_count != new.expert_count:
        raise ValueError(
            f"placements of {old.experts.shape} on {old.ranks} and {new.experts.shape} on {new.ranks} ranks differ in "
            "shape; load the weights afresh"
        )
    transfers: list[Transfer] = []
    copies: list[Copy] = []
    for layer in range(old.layers) if layers is None else layers:
        for move in _layer_moves(old, new, layer):
            if isinstance(move, Transfer):
                transfers.append(move)
            else:
                copies.append(move)
    return MovePlan(tuple(transfers), tuple(copies))


def serving_sender(senders: Sequence[int], receivers: int, index: int) -> int:
    """Who serves receiver number `index`: equal shares of consecutive receivers first, the rest one for each sender."""
    share = receivers // len(senders)
    if index < share * len(senders):
        return senders[index // share]
    return senders[index - share * len(senders)]


def _layer_moves(old: Placement, new: Placement, layer: int) -> Iterator[Transfer | Copy]:
    size = old.size
    before, after = old.experts[layer].tolist(), new.experts[layer].tolist()
    # Per expert: the first place of each rank that holds it, and each rank's places that are to hold it.
    sources: dict[int, dict[int, int]] = {}
    for place, expert in enumerate(before):
        sources.setdefault(expert, {}).setdefault(place // size, place)
    needs: dict[int, dict[int, list[int]]] = {}
    for place, expert in enumerate(after):
        if before[place] != expert:
            needs.setdefault(expert, {}).setdefault(place // size, []).append(place)
    for expert, targets in sorted(needs.items()):
        held = sources[expert]
        senders = list(held)
        receivers = [rank for rank in targets if rank not in held]
        for index, rank in enumerate(receivers):
            first, *more = targets[rank]
            sender = serving_sender(senders, len(receivers), index)
            yield Transfer(layer, expert, sender, held[sender], rank, first)
            yield from (Copy(layer, expert, rank, first, place, True) for place in more)
        for rank, places in targets.items():
            if rank in held:
                yield from (Copy(layer, expert, rank, held[rank], place, False) for place in places)
