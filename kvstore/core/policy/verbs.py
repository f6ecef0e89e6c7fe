"""The verbs every cache policy speaks, so that a store and a replay can use any of them; pure, time is an argument.

A grain id is a small integer that names a grain AND its whole prefix (a chain key's number), below the `grains_max`
a policy was built for. A chain is one request's ids from its first grain on. Only leading hits are worth anything,
so a request is one operation on a chain, not one per grain.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Chain = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
NOBODY: Chain = np.empty(0, np.int32)


class Served(NamedTuple):
    """What a request found before it wrote: its leading resident grains, and all resident ones, reachable or not."""

    hits: int
    resident: int


class Policy(Protocol):
    """What stays and what goes. `now_us` must not run backwards. A chain handed over must not be changed afterwards.

    Ids returned by a verb are no longer resident and may be given to other grains.
    """

    @property
    def live(self) -> int:
        """Resident grains."""

    def lookup(self, chain: Chain, now_us: int) -> int:
        """Leading resident grains of the chain at this time; changes nothing."""

    def touch(self, chain: Chain, now_us: int) -> None:
        """A read used these resident grains (a leading part of a chain)."""

    def insert(self, chain: Chain, now_us: int) -> Chain:
        """A whole chain was written: absent grains become resident, resident ones are used. Returns evicted ids."""

    def evict(self, count: int) -> Chain:
        """Let at least `count` grains go if that many may go; returns their ids."""

    def expire(self, now_us: int) -> Chain:
        """Let go of what is past its time; returns the ids."""

    def serve(self, chain: Chain, now_us: int) -> Served:
        """One request of a replay: expire, look up, then write the whole chain."""


def leading(present: Flags) -> int:
    """How many values from the front are true."""
    if not len(present):
        return 0
    first = int(present.argmin())
    return len(present) if present[first] else first


def joined(parts: list[Chain]) -> Chain:
    """The ids of all parts in order."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NOBODY
