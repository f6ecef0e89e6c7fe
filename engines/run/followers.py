"""Context-parallel ranks behind one engine: the leader, rank 0, plans and samples, and the others follow.

Followers repeat, in the same order, whatever the leader does to its memory and model, so that their caches stay equal
to its own, to the byte. They hold no scheduler, no requests and no sampler: a forward leaves the rows that are sampled
on every rank, and the leader alone draws.
"""

import dataclasses
import io
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch
from shoal.engines.config import Truncation
from shoal.engines.core.layout import BlockLayout, SlotLayout
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.decoder import Model
from shoal.engines.run.bound import BoundModel
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.rank_group import Collectives
from torch import Tensor

LEADER = 0


class Order(StrEnum):
    """What followers are told to do, each with its argument."""

    FORWARD = "forward"
    JOIN = "join"
    CLONE_BLOCKS = "clone_blocks"
    CLONE_SLOTS = "clone_slots"
    ZERO_SLOTS = "zero_slots"
    WRITE_BLOCK = "write_block"
    WRITE_STORED = "write_stored"
    WAIT = "wait"
    END = "end"


class Followers:
    """The leader's end of the group. One thread gives all orders."""

    def __init__(self, group: Collectives) -> None:
        assert group.rank == LEADER, f"rank {group.rank} follows; rank {LEADER} leads"
        self.group = group

    def tell(self, order: Order, argument: object = ()) -> None:
        """Give an order with plain values or tensors; raises GroupBrokenError if a follower is gone."""
        stream = io.BytesIO()
        torch.save((str(order), argument), stream)
        told = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).unsqueeze(1)
        others = self.group.size - 1
        self.group.all_gather(torch.tensor([len(told)]))
        self.group.exchange(told.repeat(others, 1), [0, *[len(told)] * others], [0] * self.group.size)

    def wait(self) -> None:
        """Show that the leader lives: due, while there is nothing to do, more often than the group waits."""
        self.tell(Order.WAIT)

    def end(self) -> None:
        """Let everybody return from `Follower.run`."""
        self.tell(Order.END)


class LeadingModel(BoundModel):
    """A model whose rows all ranks compute together."""

    def __init__(self, model: Model, caches: Caches, truncation: Truncation, followers: Followers) -> None:
        super().__init__(model, caches, truncation)
        self._followers = followers

    def forward(self, batch: Batch) -> Tensor:
        """See BoundModel."""
        self._followers.tell(Order.FORWARD, {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)})
        return super().forward(batch)

    def join(self) -> None:
        """See BoundModel."""
        self._followers.tell(Order.JOIN)
        super().join()


class LeadingMemory(DeviceMemory):
    """The leader's memory; what changes it changes everybody's."""

    def __init__(
        self, blocks_count: int, block: BlockLayout, slots_count: int, slot: SlotLayout, followers: Followers
    ) -> None:
        super().__init__(blocks_count, block, slots_count, slot)
        self._followers = followers

    def clone_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See DeviceMemory."""
        self._tell(Order.CLONE_BLOCKS, pairs := tuple(pairs))
        super().clone_blocks(pairs)

    def clone_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See DeviceMemory."""
        self._tell(Order.CLONE_SLOTS, pairs := tuple(pairs))
        super().clone_slots(pairs)

    def zero_slots(self, ids: Iterable[int]) -> None:
        """See DeviceMemory."""
        self._tell(Order.ZERO_SLOTS, ids := tuple(ids))
        super().zero_slots(ids)

    def write_block(self, block: int, payload: bytes) -> None:
        """See DeviceMemory."""
        super().write_block(block, payload)
        self._followers.tell(Order.WRITE_BLOCK, (block, as_tensor(payload)))

    def write_stored(self, slot: int, payload: bytes) -> None:
        """See DeviceMemory."""
        super().write_stored(slot, payload)
        self._followers.tell(Order.WRITE_STORED, (slot, as_tensor(payload)))

    def _tell(self, order: Order, items: tuple[object, ...]) -> None:
        if items:
            self._followers.tell(order, items)


class Follower:
    """One rank that is not the leader: its own memory of the same shape, and the same model bound to it."""

    def __init__(self, group: Collectives, model: BoundModel, memory: DeviceMemory) -> None:
        assert group.rank != LEADER, f"rank {LEADER} leads"
        self._group, self._model, self.memory = group, model, memory

    def run(self) -> None:
        """Do what the leader does until it ends; raises GroupBrokenError if it is gone or silent."""
        while (told := self._next())[0] is not Order.END:
            self._do(*told)

    def _next(self) -> tuple[Order, Any]:
        size = self._group.size
        lengths = self._group.all_gather(torch.zeros(1, dtype=torch.int64)).flatten().tolist()
        told = self._group.exchange(torch.empty(0, 1, dtype=torch.uint8), [0] * size, lengths)
        order, argument = torch.load(io.BytesIO(told.numpy().tobytes()), weights_only=True)
        return Order(order), argument

    def _do(self, order: Order, argument: Any) -> None:
        match order:
            case Order.FORWARD:
                self._model.forward(Batch(**argument))
            case Order.JOIN:
                self._model.join()
            case Order.WRITE_BLOCK:
                self.memory.write_block(argument[0], argument[1].numpy().tobytes())
            case Order.WRITE_STORED:
                self.memory.write_stored(argument[0], argument[1].numpy().tobytes())
            case Order.CLONE_BLOCKS:
                self.memory.clone_blocks(argument)
            case Order.CLONE_SLOTS:
                self.memory.clone_slots(argument)
            case Order.ZERO_SLOTS:
                self.memory.zero_slots(argument)
            case Order.WAIT:
                pass


def as_tensor(payload: bytes) -> Tensor:
    """Bytes as uint8 [n], which an order can carry."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
