"""Moves expert weights between the ranks of a group in the background of steps, a bounded number of bytes a step.

Every rank calls `ExpertMover.step` between the same two steps. It waits for what was posted one step ago, takes a
layer over when all of it is there, and posts the next batch, which travels while the step computes. All ranks compute
the same batches, so a layer's tables change everywhere between the same two steps, without a vote: a rank whose bytes
are late waits, it never computes with half a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from shoal.engines.core.experts.moves import MovePlan, plan_moves
from shoal.engines.core.experts.placement import REPLICA_STRIDE, Placement
from shoal.engines.core.experts.schedule import Batch, Piece, schedule
from shoal.engines.model.moe import Expert, MoeWeights
from shoal.engines.model.numerics import Linear
from shoal.engines.run.rank_group import Collectives
from torch import Tensor


class ExpertMoveError(RuntimeError):
    """A peer did not send or take its bytes in time. The group's tables may differ now: it must be replaced whole."""


class ExpertBank:
    """The experts of one rank: uint8 [layers, places of the rank, bytes of an expert], the gate-up rows first.

    Views of it that operators hold stay valid: a move changes bytes, never addresses. All experts of all layers have
    the shapes and types of the first.
    """

    def __init__(self, layers: Sequence[MoeWeights], placement: Placement, rank: int) -> None:
        """Copy the experts that `placement` gives to `rank` out of the whole model's weights."""
        self._like = layers[0].experts[0]
        gate_up, down = self._like.gate_up.weight, self._like.down.weight
        self._parts = (gate_up.nbytes, down.nbytes)
        self.rank = rank
        self.bytes = torch.empty((len(layers), placement.size, sum(self._parts)), dtype=torch.uint8)
        for layer, weights in enumerate(layers):
            for place, expert in enumerate(placement.by_rank()[layer, rank].tolist()):
                given = weights.experts[expert]
                assert given.gate_up.weight.shape == gate_up.shape, f"expert {expert} of layer {layer} has other shapes"
                whole = torch.cat(
                    [part.weight.contiguous().view(torch.uint8).flatten() for part in (given.gate_up, given.down)]
                )
                self.bytes[layer, place] = whole

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(self._parts)

    def expert(self, layer: int, place: int) -> Expert:
        """The expert at a place of this rank (0 is its first), as views of the bank."""
        gate_up, down = (
            Linear(part.view(like.weight.dtype).view(like.weight.shape), like.is_quantised)
            for part, like in zip(
                self.bytes[layer, place].split(self._parts), (self._like.gate_up, self._like.down), strict=True
            )
        )
        return Expert(gate_up, down)


@dataclass(frozen=True, slots=True)
class GateTables:
    """A placement as the gate reads it: places int64 [layers, experts, width] and counts int64 [layers, experts]."""

    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, placement: Placement) -> "GateTables":
        """The tables of a placement."""
        return cls(
            torch.from_numpy(placement.places.astype("int64")), torch.from_numpy(placement.counts.astype("int64"))
        )

    def places_of(self, layer: int, choice: Tensor, ep_rank: int) -> Tensor:
        """The place of each row's experts: int64 [rows, top] for choice [rows, top]; a row's number is its token's.

        Replica (ep_rank + token x 23333) mod count: even over a rank's tokens, and different from rank to rank.
        """
        counts = self.counts[layer][choice]
        tokens = torch.arange(len(choice), device=choice.device).unsqueeze(-1)
        return self.places[layer][choice, (ep_rank + tokens * REPLICA_STRIDE) % counts]


class ExpertMover:
    """Carries a rank's bank from one placement to the next. `placement` is what all ranks compute with just now."""

    def __init__(
        self, bank: ExpertBank, placement: Placement, group: Collectives, step_bytes_max: int, wait_s: float
    ) -> None:
        """`wait_s`: the longest `step` waits for its peers. Group rank and rank of the bank must be one."""
        assert group.rank == bank.rank, f"group rank {group.rank} moves the bank of {bank.rank}"
        self.placement = placement
        self._bank, self._group = bank, group
        self._step_bytes_max, self._wait_s = step_bytes_max, wait_s
        # The places of one layer, as they are to be.
        self._spare = torch.empty_like(bank.bytes[0])
        self._target = placement
        self._plan = MovePlan((), ())
        self._batches: list[Batch] = []
        self._posted: list[tuple[dist.Work, Piece]] = []
        self._travelling: Batch | None = None

    @property
    def is_moving(self) -> bool:
        """Whether a rearrangement is under way."""
        return self._travelling is not None or bool(self._batches)

    def begin(self, target: Placement) -> int:
        """Plan the way to `target`; returns after how many calls of `step` it is in force. Nothing is sent yet.

        Every rank calls this between the same two steps. Asserts that no rearrangement is under way.
        """
        assert not self.is_moving, "one rearrangement at a time: begin the next when is_moving is false"
        self._target = target
        self._plan = plan_moves(self.placement, target)
        self._batches = list(schedule(self._plan, self._bank.expert_bytes, self._step_bytes_max))
        self._settle_unmoved()
        return len(self._batches) + 1 if self._batches else 0

    def step(self) -> tuple[int, ...]:
        """Between two steps, on every rank: end the last batch, begin the next; returns the layers changed just now.

        Raises ExpertMoveError when a peer keeps it waiting too long.
        """
        changed: tuple[int, ...] = ()
        if self._travelling is not None:
            self._wait(self._travelling)
            if self._travelling.completes_layer:
                self._take_over(self._travelling.layer)
                changed = (self._travelling.layer,)
        self._travelling = self._batches.pop(0) if self._batches else None
        if self._travelling is not None:
            self._post(self._travelling)
        return changed

    def _settle_unmoved(self) -> None:
        """Layers without a move change at once: their places hold the same, only the order of replicas may differ."""
        moved = {batch.layer for batch in self._batches}
        still = [layer for layer in range(self.placement.layers) if layer not in moved]
        self.placement = self.placement.with_layers(self._target, still)

    def _post(self, batch: Batch) -> None:
        rank, size = self._bank.rank, self.placement.size
        for tag, piece in enumerate(batch.pieces):
            move, span = piece.transfer, slice(piece.first, piece.first + piece.length)
            if move.sender == rank:
                bytes_ = self._bank.bytes[batch.layer, move.source - rank * size, span]
                work = self._group.send(bytes_, move.receiver, tag)
            elif move.receiver == rank:
                work = self._group.receive(self._spare[move.target - rank * size, span], move.sender, tag)
            else:
                continue
            self._posted.append((work, piece))

    def _wait(self, batch: Batch) -> None:
        deadline = monotonic() + self._wait_s
        for work, piece in self._posted:
            move = piece.transfer
            peer, verb = (move.receiver, "take") if move.sender == self._bank.rank else (move.sender, "send")
            left = max(deadline - monotonic(), 1e-3)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise ExpertMoveError(
                    f"rank {self._bank.rank}: rank {peer} did not {verb} {piece.length} bytes of expert {move.expert}, "
                    f"layer {batch.layer}, within {self._wait_s} s; replace the group ({error})"
                ) from error
        self._posted = []

    def _take_over(self, layer: int) -> None:
        """Local copies into the spare places, then all changed places at once: a source may be a target too."""
        rank, size = self._bank.rank, self.placement.size
        here, first = self._bank.bytes[layer], rank * size
        changed = [move.target - first for move in self._plan.receives(rank) if move.layer == layer]
        for copy in self._plan.copies_of(rank):
            if copy.layer == layer:
                source = self._spare if copy.is_received else here
                self._spare[copy.target - first] = source[copy.source - first]
                changed.append(copy.target - first)
        here[changed] = self._spare[changed]
        self.placement = self.placement.with_layers(self._target, (layer,))
