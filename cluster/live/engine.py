"""The actor that owns one rank of a PROMPT, COMPLETION or NORMAL group: its steps, hand-offs, saves and letters.

Each method converts, hands the work to whoever owns it, and answers; what to do is decided in cores.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.handoff import Group, Refused, ToSource, ToTarget
from shoal.cluster.core.membership import View
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.names import COMPLETION, PROMPT, role_of
from shoal.cluster.live.outbox import Letter
from shoal.cluster.live.sequences import Sequences
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.submission import Origin, Submission, TicketOffer
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks
from shoal.engines.core.request import NoRoom, Rejected

if TYPE_CHECKING:
    from shoal.cluster.live.engine_parts import EngineParts
    from shoal.cluster.live.rank_meeting import RankMeeting

ENTRYPOINT_SILENT_S = 15.0
STEP_LIMIT_S = 300.0  # far beyond any step, kernels compiled in the first one included
REPORT_S = 0.1
WAKE_S = 0.25
DRAIN_POLL_S = 0.1


class EngineActor:
    """One rank. Until `open` has returned only `ping`, `lifeline` and `pid` may be called.

    Whoever unpickles a handle of an actor imports its module: so torch and the engine are imported in `open`, and
    balancers, store and controller stay small.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        group: GroupRef,
        place: Surroundings = RAY,
        entrypoint_silent_s: float = ENTRYPOINT_SILENT_S,
    ) -> None:
        begin_logging(str(group))
        self._spec = spec
        self._group = group
        self._place = place
        self._entrypoint_silent_s = entrypoint_silent_s
        self._parts: EngineParts | None = None
        self._directory = place.members(spec.name, self._on_view)
        self._tasks = Tasks(place.end)
        self._alive: frozenset[GroupRef] = frozenset()
        self._is_draining = False
        self._meeting: RankMeeting | None = None
        self._is_meeting = asyncio.Event()

    # ------------------------------------------------------------ member

    async def open(self) -> None:
        """Load the model, register memory, begin stepping."""

        import torch
        from shoal.cluster.live.engine_build import open_parts

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        from shoal.cluster.live.rank_meeting import RankMeeting

        self._meeting = meeting = RankMeeting(self._spec, self._group, self._place)
        self._is_meeting.set()
        self._parts = parts = await open_parts(self._spec, self._group, self._directory, self._place, meeting)
        parts.steps.start()
        self._tasks.spawn_vital(self._directory.follow())
        self._tasks.spawn_vital(self._report_forever())
        self._tasks.spawn_vital(self._wake_forever())
        if parts.target is not None:
            self._tasks.spawn_vital(parts.target.poll_forever())
            self._tasks.spawn_vital(self._renew_forever())
        if parts.source is not None:
            self._tasks.spawn_vital(self._renew_forever())

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._parts is not None

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """Take nothing new; returns when nothing is left, saves and undelivered letters included."""
        self._is_draining = True
        parts = self._open_parts()
        while not parts.is_idle():
            await asyncio.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._tasks.cancel()
        if self._parts is not None:
            self._parts.close()

    async def status(self) -> dict[str, Any]:
        """Counts for `shoal status`, tests of leaks, and metrics."""
        parts = self._open_parts()
        capacity = await parts.steps.call(lambda engine: engine.capacity())
        return {
            "group": str(self._group),
            "capacity": capacity,
            "sequences": len(parts.sequences),
            "tickets": parts.open_tickets(),
            "implementations": parts.implementations,
            "counters": parts.counters(),
        }

    async def counters(self) -> Mapping[str, int]:
        """Counts since this life's start, without waiting for a step."""
        return dict(self._open_parts().counters())

    # ------------------------------------------------------------ ranks of one group

    async def meeting(self) -> tuple[str, int]:
        """Rank 0: host and port at which the ranks of this life's group meet."""
        await self._is_meeting.wait()
        assert self._meeting is not None, "set before the event"
        return await self._meeting.address()

    async def wake(self, vote: int) -> None:
        """Another rank has work and calls to a vote. It may be ready a moment before this one is."""
        while self._parts is None:
            await asyncio.sleep(DRAIN_POLL_S)
        self._parts.steps.wake(vote)

    # ------------------------------------------------------------ requests

    async def reserve(
        self, origin: Origin, sequence: str, source: GroupRef, tokens: int, deadline_us: int
    ) -> TicketOffer | NoRoom | Rejected | Refused:
        """COMPLETION: memory for a prompt of `tokens` tokens that the PROMPT group `source` will write."""
        if self._is_draining:
            return NoRoom(sequences_short=1)
        return await self._open_parts().reserve(origin, sequence, source, tokens, deadline_us)

    async def submit(self, submission: Submission) -> Rejected | Refused | None:
        """PROMPT or NORMAL: take a sequence. Rejected: it can never run; Refused: not here. Twice is once."""
        parts = self._open_parts()
        if self._is_draining:
            return Refused(f"{self._group} is draining")
        return await parts.submit(submission)

    async def abort(self, sequence: str, reason: str) -> None:
        """End a sequence in whatever state it is; unknown names are fine."""
        await self._open_parts().abort(sequence, reason)

    async def poll(self, entrypoint: str, after: int, wait_s: float) -> tuple[int, list[Letter]]:
        """Letters for an entrypoint after number `after`; after a quiet `wait_s` a word about its sequences here."""
        return await self._open_parts().poll(entrypoint, after, wait_s)

    async def peer(self, message: ToSource | ToTarget) -> None:
        """A message about a ticket from the engine at its other end."""
        parts = self._open_parts()
        if parts.source is not None:
            parts.source.receive(message)  # type: ignore[arg-type]
        elif parts.target is not None:
            parts.target.receive(message)  # type: ignore[arg-type]

    # ------------------------------------------------------------ periodic

    def _open_parts(self) -> "EngineParts":
        assert self._parts is not None, f"{self._group} is called before open() has returned"
        return self._parts

    def _on_view(self, view: View) -> None:
        """Tell both ledgers which peers are lost."""
        parts, alive = self._open_parts(), frozenset(view.alive())
        for lost in self._alive - alive:
            peer = Group(lost.name, lost.epoch)
            if parts.source is not None and role_of(lost) == COMPLETION:
                parts.source.target_lost(peer)
            if parts.target is not None and role_of(lost) == PROMPT:
                parts.target.source_lost(peer)
        self._alive = alive

    async def _report_forever(self) -> None:
        """Tell the role's balancer the load; it also learns which reservations have become real."""
        parts = self._open_parts()
        while True:
            await parts.report(self._directory)
            await asyncio.sleep(REPORT_S)

    async def _wake_forever(self) -> None:
        """Deadlines of tickets, entrypoints that have gone away with their clients, a step that never ends."""
        parts = self._open_parts()
        while True:
            if parts.steps.step_s > STEP_LIMIT_S:  # pings are answered by this loop, so nobody else can see it
                raise TimeoutError(f"{self._group}: a step has run for {STEP_LIMIT_S:g} s")
            parts.wake()
            for entrypoint in parts.outbox.silent(self._entrypoint_silent_s):
                self._tasks.spawn(self._abort_all(parts.sequences, entrypoint))  # waits for steps; this loop must not
            await asyncio.sleep(WAKE_S)

    async def _abort_all(self, sequences: Sequences, entrypoint: str) -> None:
        for sequence in sequences.of(entrypoint):
            await self.abort(sequence, f"entrypoint {entrypoint} is gone")

    async def _renew_forever(self) -> None:
        parts = self._open_parts()
        assert self._spec.cluster.transfer is not None
        while True:
            parts.heartbeat()
            await asyncio.sleep(self._spec.cluster.transfer.lease_us / 3e6)
