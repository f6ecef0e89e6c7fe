"""The COMPLETION side of hand-offs: reserves before anybody writes, verifies what landed, admits, quarantines.

Owned by the engine's asyncio loop; checksums run in one worker thread, memory changes hands in the step loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.cluster.core.handoff import (
    Ended,
    Group,
    Refused,
    Send,
    StateArrived,
    Ticket,
    TicketId,
    TicketState,
    ToTarget,
    decode_written,
)
from shoal.cluster.core.names import engine_id
from shoal.cluster.core.target_ledger import Admit, Ask, FreeReservation, TargetEffect, TargetLedger, Verify
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.handoff_bytes import HandoffBytes, digest_of
from shoal.cluster.live.tasks import Tasks
from shoal.cluster.transfer import Transfer
from shoal.engines.core.plan import Accepted, Reservation
from shoal.engines.core.request import NoRoom, Rejected, TokenState

log = logging.getLogger(__name__)

POLL_S = 0.001  # while a ticket is open: notifications and incoming writes progress only when somebody polls
IDLE_POLL_S = 0.02
RESEND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class TargetPorts:
    """What the target side asks of its engine.

    `reserve`, `cancel` and `admit` run in the step loop; `admit` gives its answer to a callable, before the output of
    the sequence's first step. `admitted(ticket, state, handoff_us)` and `ended` tell the request's entrypoint;
    `handoff_us` is how long the sequence waited after its prompt was done. A ticket that ends after its sequence was
    admitted is nobody's business any more: `ended` is not called for it.
    """

    transfer: Transfer
    send: Callable[[Group, object], None]
    reserve: Callable[[str, int], Awaitable[Reservation | NoRoom | Rejected]]
    cancel: Callable[[Reservation], None]
    admit: Callable[[Reservation, TokenState, Callable[[Accepted | Rejected], None]], Awaitable[None]]
    admitted: Callable[[Ticket, TokenState, int], None]
    ended: Callable[[Ended], None]


class HandoffTarget:
    """All incoming tickets of one COMPLETION engine."""

    def __init__(self, group: Group, layout: HandoffBytes, ports: TargetPorts, lease_us: int, checksum: bool) -> None:
        self._ledger = TargetLedger(group, lease_us, RESEND_US)
        self._layout = layout
        self._ports = ports
        self._checksum = checksum
        self._reservations: dict[TicketId, Reservation] = {}
        self._opening: dict[tuple[str, int], bool] = {}  # attempts being reserved: whether aborted meanwhile
        self._state_us: dict[TicketId, int] = {}
        self._admitted: set[TicketId] = set()  # the scheduler's: how their tickets end is the source's business alone
        self._tasks = Tasks()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="verify")

    async def reserve(self, ask: Ask, sequence: str, tokens: int) -> Ticket | NoRoom | Rejected | Refused:
        """Memory for a prompt of `tokens` tokens and its first output, as a ticket; asked again, the same ticket."""
        attempt = (ask.request_id, ask.attempt)
        if (known := self._ledger.find(*attempt)) is not None:
            return known
        if attempt in self._opening:
            return Refused(f"{sequence} is being reserved by an earlier call")
        self._opening[attempt] = False
        try:
            reservation = await self._ports.reserve(sequence, tokens + 1)
        finally:
            is_aborted = self._opening.pop(attempt)
        if not isinstance(reservation, Reservation):
            return reservation
        ticket: Ticket | Refused = Refused(f"{sequence} was aborted meanwhile")
        if not is_aborted:
            ticket = self._ledger.open(ask, reservation.blocks, reservation.slot, now_us())
        if isinstance(ticket, Refused):
            self._ports.cancel(reservation)
            return ticket
        self._reservations[ticket.ticket_id] = reservation
        return ticket

    def receive(self, message: ToTarget) -> None:
        """A message of a source."""
        if isinstance(message, StateArrived) and message.ticket_id in self._reservations:  # it may be repeated
            self._state_us.setdefault(message.ticket_id, now_us())
        self._perform(self._ledger.receive(message, now_us()))

    def abort(self, request_id: str, attempt: int, reason: str) -> bool:
        """End an attempt's open ticket; False if the scheduler may know the sequence.

        True also while its memory is quarantined: the scheduler must not free what the source may still write into.
        """
        if (request_id, attempt) in self._opening:
            self._opening[request_id, attempt] = True
            return True
        ticket = self._ledger.find(request_id, attempt)
        if ticket is not None:
            if ticket.ticket_id in self._admitted:
                return False
            self._perform(self._ledger.abort(ticket.ticket_id, reason, now_us()))
            return True
        sequence = engine_id(request_id, attempt)
        return any(reservation.request_id == sequence for reservation in self._reservations.values())

    def source_lost(self, source: Group) -> None:
        """A PROMPT group's life is over."""
        self._ports.transfer.remove_peer(source.agent)
        self._perform(self._ledger.source_lost(source, now_us()))

    def wake(self) -> None:
        """Expire what is over; call a few times a second."""
        self._perform(self._ledger.wake(now_us()))

    def heartbeat(self) -> None:
        """Renew leases; call every third of a lease."""
        for renewal in self._ledger.heartbeats():
            self._ports.send(renewal.to, renewal.message)

    def open_tickets(self) -> int:
        """Open and quarantined tickets."""
        return len(self._ledger.tickets())

    def close(self) -> None:
        """Stop verifying and admitting."""
        self._tasks.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def poll_forever(self) -> None:
        """Take notifications as they arrive."""
        while True:
            for note in self._ports.transfer.poll():
                message = decode_written(note.message)
                if isinstance(message, Refused):
                    log.error("notification from %s refused: %s", note.peer, message.reason)
                    continue
                self._perform(self._ledger.receive(message, now_us()))
            await asyncio.sleep(POLL_S if self._reservations else IDLE_POLL_S)

    def _perform(self, effects: tuple[TargetEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._ports.send(to, message)
                case Verify(ticket):
                    self._tasks.spawn(self._verify(ticket))
                case Admit(ticket, state):
                    self._admitted.add(ticket.ticket_id)
                    self._tasks.spawn(self._admit(ticket, state))
                case FreeReservation(ticket):
                    self._state_us.pop(ticket.ticket_id, None)
                    if (reservation := self._reservations.pop(ticket.ticket_id, None)) is not None:
                        self._ports.cancel(reservation)
                case Ended(ticket):
                    if ticket.ticket_id in self._admitted:
                        self._admitted.remove(ticket.ticket_id)
                    else:
                        self._ports.ended(effect)

    async def _verify(self, ticket: Ticket) -> None:
        if (reservation := self._reservations.get(ticket.ticket_id)) is None:
            return  # it has ended meanwhile
        try:
            count = self._layout.blocks_for(reservation.tokens - 1)  # the output is not sent
            parts = (*self._layout.block_parts(ticket.blocks[:count]), *self._layout.slot_parts(ticket.slot))
            sums = await asyncio.get_running_loop().run_in_executor(self._worker, digest_of, parts, self._checksum)
        except Exception as error:  # its request must not wait for a check that never ends
            log.exception("%s cannot be verified", ticket.ticket_id)
            self._perform(self._ledger.abort(ticket.ticket_id, f"verification: {type(error).__name__}", now_us()))
            return
        self._perform(self._ledger.verified(ticket.ticket_id, sums, now_us()))

    async def _admit(self, ticket: Ticket, state: TokenState) -> None:
        reservation = self._reservations.pop(ticket.ticket_id)

        def then(answer: Accepted | Rejected) -> None:
            waited_us = now_us() - self._state_us.pop(ticket.ticket_id, now_us())
            if isinstance(answer, Rejected):
                log.warning("%s verified but not admitted: %s", ticket.ticket_id, answer.reason)
                self._ports.cancel(reservation)
                self._ports.ended(Ended(ticket, TicketState.ABORTED, f"not admitted: {answer.reason}"))
            else:
                self._ports.admitted(ticket, state, waited_us)

        try:
            await self._ports.admit(reservation, state, then)
        except ValueError as error:  # a state of another request: what the source says is not trusted
            then(Rejected(reservation.request_id, str(error)))
