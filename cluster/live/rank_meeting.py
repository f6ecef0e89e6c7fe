"""How the ranks of one group, each an actor of its own, find each other before their first step and wake each other."""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError
from shoal.balancers.reports import GroupRef
from shoal.cluster.live.names import role_of
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import Surroundings
from shoal.cluster.live.tasks import Tasks
from shoal.engines.run.rank_group import MEET_S, Collectives, GlooGroup, Meeting

log = logging.getLogger(__name__)

SEEK_S = 0.1
SILENT_S = 60.0  # a rank that has said nothing for so long in a step; a dead one is noticed at once


class RankMeeting:
    """One rank's knowledge of its group's other ranks, which all live in one epoch."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, place: Surroundings) -> None:
        self._cluster, self._group, self._place = spec.name, group, place
        self.size = spec.group(role_of(group)).ranks
        role, index = role_of(group), int(group.name.rpartition("/")[2])
        self.rank = index % self.size
        first = index - self.rank
        self._ranks = tuple(GroupRef(f"{role}/{i}", group.epoch) for i in range(first, first + self.size))
        self._address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._mates: list[Any] = []
        self._store: Any = None
        self._tasks = Tasks()

    async def address(self) -> tuple[str, int]:
        """Rank 0: where the others find its store, as soon as it is open."""
        return await asyncio.wait_for(asyncio.shield(self._address), MEET_S)

    async def meet(self) -> Collectives | None:
        """The group's collectives once all ranks are there; None for a group of one. TimeoutError if they are not."""
        if self.size == 1:
            return None
        loop = asyncio.get_running_loop()
        if self.rank == 0:
            host = self._place.host()
            self._store = await loop.run_in_executor(None, GlooGroup.open_store, host, self.size)
            self._address.set_result((host, self._store.port))
        async with asyncio.timeout(MEET_S):
            self._mates = [await self._seek(rank) for rank in self._ranks if rank != self._group]
            host, port = await (self.address() if self.rank == 0 else self._mates[0].meeting.remote())
        meeting = Meeting(host, port, self.rank, self.size)
        if self.rank:
            self._store = await loop.run_in_executor(None, GlooGroup.find_store, meeting)
        met: Collectives = await loop.run_in_executor(None, GlooGroup, meeting, self._store, SILENT_S)
        log.info("%s is rank %d of %d, met at %s:%d", self._group, self.rank, self.size, host, port)
        return met

    def wake_others(self, vote: int) -> None:
        """Ask the other ranks to take part in vote `vote`. On the actor's loop; a rank that is gone ends us all."""
        for mate in self._mates:
            self._tasks.spawn(self._wake(mate, vote))

    async def _wake(self, mate: Any, vote: int) -> None:
        try:
            await mate.wake.remote(vote)
        except RayError as error:
            log.warning("%s cannot wake a rank of its group: %s", self._group, type(error).__name__)

    async def _seek(self, rank: GroupRef) -> Any:
        while (handle := self._place.find(self._cluster, rank)) is None:
            await asyncio.sleep(SEEK_S)
        return handle
