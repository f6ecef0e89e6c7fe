"""The ranks of one group: how they meet, and the collectives that their steps are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

MEET_S = 60.0


class GroupBrokenError(RuntimeError):
    """A rank of the group is gone or silent: no collective can end any more, so the group must be replaced whole."""


class Collectives(Protocol):
    """What the ranks of a group do together. All ranks make the same calls in the same order, from one thread each."""

    @property
    def rank(self) -> int:
        """This rank, 0 and up."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(self, own: Tensor) -> Tensor:
        """Everybody's `own` [...], as [ranks, ...]; raises GroupBrokenError."""
        ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows [sum(sent), W], `sent[r]` of them to rank r, in order; the rows [sum(received), W] of everybody for
        this rank, by rank. Raises GroupBrokenError."""
        ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one group find each other: rank 0's store."""

    host: str
    port: int
    rank: int
    size: int


class GlooGroup:
    """Collectives over gloo, on this machine or over TCP. A dead peer is noticed at once, a silent one after `wait_s`.

    No process-wide state: several groups, and several ranks of one, may live in one process.
    """

    def __init__(self, meeting: Meeting, store: TCPStore, wait_s: float) -> None:
        """Meet the others; raises GroupBrokenError if they do not come within MEET_S."""
        self._rank, self._size = meeting.rank, meeting.size
        try:
            # torch's stubs know no more of this class than its name.
            group: Any = dist.ProcessGroupGloo
            self._group = group(store, meeting.rank, meeting.size, timedelta(seconds=wait_s))
            self._group.barrier().wait(timedelta(seconds=MEET_S))
        except RuntimeError as error:
            raise GroupBrokenError(f"rank {meeting.rank} of {meeting.size} did not meet the others: {error}") from error

    @classmethod
    def open_store(cls, host: str, size: int) -> TCPStore:
        """The store of rank 0, on a free port; it lives as long as the object."""
        return TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_S))

    @classmethod
    def find_store(cls, meeting: Meeting) -> TCPStore:
        """Rank 0's store as another rank sees it."""
        wait = timedelta(seconds=MEET_S)
        return TCPStore(meeting.host, meeting.port, meeting.size, is_master=False, timeout=wait)

    @property
    def rank(self) -> int:
        """See Collectives."""
        return self._rank

    @property
    def size(self) -> int:
        """See Collectives."""
        return self._size

    def all_gather(self, own: Tensor) -> Tensor:
        """See Collectives."""
        everybodys = [torch.empty_like(own) for _ in range(self._size)]
        self._wait(self._group.allgather([everybodys], [own]))
        return torch.stack(everybodys)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See Collectives."""
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        self._wait(self._group.alltoall_base(arrived, rows.contiguous(), list(received), list(sent)))
        return arrived

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"rank {self._rank} of {self._size} lost another: {error}") from error
