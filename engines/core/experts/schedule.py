"""In which step each byte of a rearrangement travels, so that all ranks know without asking when a layer is whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.engines.core.experts.moves import MovePlan, Transfer


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `first` .. `first + length` of a transfer's expert."""

    transfer: Transfer
    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What travels for one layer during one step, in the order both ends post it."""

    layer: int
    pieces: tuple[Piece, ...]
    completes_layer: bool


def schedule(plan: MovePlan, expert_bytes: int, step_bytes_max: int) -> tuple[Batch, ...]:
    """The batches of a plan: layer by layer, in each step at most `step_bytes_max` out of a rank and as many into it.

    A layer with nothing but copies inside ranks has one empty batch. Pure: every rank computes the same batches, so a
    layer changes on all of them after the same number of steps. Raises ValueError for a budget without a byte.
    """
    if step_bytes_max < 1 or expert_bytes < 1:
        raise ValueError(
            f"step_bytes_max = {step_bytes_max} and expert_bytes = {expert_bytes} must be at least 1; give a budget"
        )
    transfers: dict[int, list[Transfer]] = {}
    for copy in plan.copies:
        transfers[copy.layer] = []
    for transfer in plan.transfers:
        transfers.setdefault(transfer.layer, []).append(transfer)
    return tuple(
        batch
        for layer, moves in sorted(transfers.items())
        for batch in _layer(layer, moves, expert_bytes, step_bytes_max)
    )


def _layer(layer: int, transfers: list[Transfer], expert_bytes: int, step_bytes_max: int) -> Iterator[Batch]:
    left = dict.fromkeys(transfers, expert_bytes)
    while True:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        pieces = []
        for transfer, bytes_left in left.items():
            used = max(sent.get(transfer.sender, 0), received.get(transfer.receiver, 0))
            length = min(bytes_left, step_bytes_max - used)
            if length > 0:
                pieces.append(Piece(transfer, expert_bytes - bytes_left, length))
                sent[transfer.sender] = sent.get(transfer.sender, 0) + length
                received[transfer.receiver] = received.get(transfer.receiver, 0) + length
        for piece in pieces:
            left[piece.transfer] -= piece.length
        left = {transfer: count for transfer, count in left.items() if count}
        yield Batch(layer, tuple(pieces), completes_layer=not left)
        if not left:
            return
