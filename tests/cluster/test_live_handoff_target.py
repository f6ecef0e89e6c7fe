"""The receiving shell: who owns memory while a ticket ends, and whom the end concerns."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from shoal.cluster.core.handoff import (
    AbortAcked,
    Ended,
    Group,
    Kind,
    KindBytes,
    Released,
    StateArrived,
    Ticket,
    Written,
)
from shoal.cluster.core.target_ledger import Ask
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.handoff_bytes import HandoffBytes, digest_of
from shoal.cluster.live.handoff_target import HandoffTarget, TargetPorts
from shoal.cluster.transfer import Transfer
from shoal.engines.core.plan import Accepted, Reservation
from shoal.engines.core.request import EngineRequest, Rejected, SamplingParams, TokenState

SOURCE, TARGET = Group("prefill/0", 3), Group("decode/0", 4)
SEQUENCE = "r/1"


class NoBytes:
    """A layout of hand-offs that carry nothing."""

    def blocks_for(self, tokens: int) -> int:
        """No blocks."""
        return 0 * tokens

    def block_parts(self, blocks: object) -> tuple[()]:
        """Nothing to check."""
        return ()

    def slot_parts(self, slot: int) -> tuple[()]:
        """Nothing to check."""
        return ()


@dataclass(slots=True)
class World:
    """One target and what it has asked of its engine."""

    admits: bool = True
    cancelled: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def target(self) -> HandoffTarget:
        """A target whose engine is this world."""

        async def reserve(sequence: str, tokens: int) -> Reservation:
            return Reservation(sequence, tokens, (1, 2), 1, 0)

        async def admit(
            reservation: Reservation, state: TokenState, then: Callable[[Accepted | Rejected], None]
        ) -> None:
            name = reservation.request_id
            then(Accepted(name) if self.admits else Rejected(name, "not reserved any more"))

        ports = TargetPorts(
            transfer=cast(Transfer, _Forgetful()),
            send=lambda to, message: None,
            reserve=reserve,
            cancel=lambda reservation: self.cancelled.append(reservation.request_id),
            admit=admit,
            admitted=lambda ticket, state, waited_us: self.admitted.append(ticket.request_id),
            ended=self.ended.append,
        )
        return HandoffTarget(TARGET, cast(HandoffBytes, NoBytes()), ports, 30_000_000, True)


class _Forgetful:
    def remove_peer(self, name: str) -> None:
        """Nobody is known here."""


def ask() -> Ask:
    expected = tuple(KindBytes(kind, 0) for kind in Kind)
    return Ask("r", 1, SOURCE, expected, now_us() + 60_000_000)


def state() -> TokenState:
    request = EngineRequest(SEQUENCE, (5, 6, 7), 3, SamplingParams(max_tokens=4))
    return TokenState(request, (5, 6, 7, 8))


async def opened(target: HandoffTarget) -> Ticket:
    ticket = await target.reserve(ask(), SEQUENCE, 3)
    assert isinstance(ticket, Ticket)
    return ticket


async def handed_off(target: HandoffTarget) -> Ticket:
    """Everything has arrived and was verified; the scheduler has been asked."""
    ticket = await opened(target)
    target.receive(Written(ticket.ticket_id, digest_of((), True)))
    target.receive(StateArrived(ticket.ticket_id, state()))
    for _ in range(200):
        await asyncio.sleep(0.005)
        if not target._tasks:  # the check runs in a thread
            return ticket
    raise AssertionError("the hand-off was not verified in a second")


def test_memory_in_quarantine_is_not_freed_by_a_second_abort() -> None:
    """An entrypoint that hears of a failed hand-off aborts the attempt everywhere: here, too, though it has ended."""

    async def run() -> None:
        world = World()
        target = world.target()
        ticket = await opened(target)
        assert target.abort("r", 1, "client gone")
        assert target.abort("r", 1, "undone again"), "the scheduler would free memory that the source may write into"
        assert world.cancelled == []
        target.receive(AbortAcked(ticket.ticket_id, SOURCE))
        assert world.cancelled == [SEQUENCE]
        assert not target.abort("r", 1, "once more")

    asyncio.run(run())


def test_a_running_sequence_does_not_end_with_its_source() -> None:
    async def run() -> None:
        world = World()
        target = world.target()
        await handed_off(target)
        assert world.admitted == ["r"]
        target.source_lost(SOURCE)
        assert world.ended == [], "the entrypoint would be told that a running sequence had failed"
        assert target.open_tickets() == 0

    asyncio.run(run())


def test_the_scheduler_aborts_what_it_has_admitted() -> None:
    async def run() -> None:
        world = World()
        target = world.target()
        ticket = await handed_off(target)
        assert not target.abort("r", 1, "client gone"), "the sequence would decode on for nobody"
        target.receive(Released(ticket.ticket_id))
        assert (target.open_tickets(), world.ended, world.cancelled) == (0, [], [])

    asyncio.run(run())


def test_a_refused_admission_is_reported_and_its_memory_is_freed() -> None:
    async def run() -> None:
        world = World(admits=False)
        target = world.target()
        await handed_off(target)
        assert world.cancelled == [SEQUENCE]
        assert [e.reason for e in world.ended] == ["not admitted: not reserved any more"]

    asyncio.run(run())
