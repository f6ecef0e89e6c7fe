"""Tickets of a completion engine: reservations, leases, verification, admission, and quarantine of unclean memory.

Memory under a ticket that ended while the source may still write stays *quarantined* here, owned by nobody else,
until the source acknowledges that no write is in flight or its epoch is known dead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.cluster.core.handoff import (
    ENDINGS,
    Abort,
    AbortAcked,
    Admitted,
    Ended,
    Group,
    KindBytes,
    KindSum,
    Refused,
    Released,
    Renew,
    Send,
    StateArrived,
    Ticket,
    TicketEvent,
    TicketId,
    TicketState,
    ToTarget,
    Written,
    advance,
)
from shoal.engines.core.request import TokenState


@dataclass(frozen=True, slots=True)
class Ask:
    """What an entrypoint asks a completion engine to reserve for."""

    request_id: str
    attempt: int
    source: Group
    expected: tuple[KindBytes, ...]
    deadline_us: int


@dataclass(frozen=True, slots=True)
class FreeReservation:
    """Effect: the ticket's blocks and slot may be used again; no write can reach them."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Verify:
    """Effect: take the checksums of what landed and call `verified`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Admit:
    """Effect: the scheduler owns blocks and slot from now on and runs the sequence."""

    ticket: Ticket
    token_state: TokenState


TargetEffect = FreeReservation | Verify | Admit | Send | Ended

SOURCE_ABORTED = "source aborted"

# While in these the source may have a write in flight; afterwards it has promised that all has landed.
_MAY_BE_WRITTEN = (TicketState.RESERVED, TicketState.WRITING)


@dataclass(frozen=True, slots=True)
class _Entry:
    ticket: Ticket
    state: TicketState
    lease_end_us: int
    resend_us: int | None = None
    sums: tuple[KindSum, ...] = ()
    token_state: TokenState | None = None

    @property
    def expiry_us(self) -> int:
        return min(self.lease_end_us, self.ticket.deadline_us)


class TargetLedger:
    """All open and quarantined tickets of one completion engine in one epoch."""

    def __init__(self, group: Group, lease_us: int, resend_us: int) -> None:
        for field, value in (("lease_us", lease_us), ("resend_us", resend_us)):
            if value <= 0:
                raise ValueError(f"TargetLedger: {field} = {value} must be positive microseconds")
        self._group = group
        self._lease_us = lease_us
        self._resend_us = resend_us
        self._serial = 0
        self._entries: dict[TicketId, _Entry] = {}
        self._dead: dict[str, int] = {}

    def open(self, ask: Ask, blocks: Iterable[int], slot: int, now_us: int) -> Ticket | Refused:
        """A ticket that owns `blocks` and `slot` from now on; on Refused the caller still owns them.

        A repeated (request, attempt) is refused while its ticket is open: ask `find` before reserving memory.
        """
        if ask.deadline_us <= now_us:
            return Refused(f"deadline of {ask.request_id} is over by {now_us - ask.deadline_us} us")
        if ask.source.epoch <= self._dead.get(ask.source.name, -1):
            return Refused(f"source {ask.source.agent} is dead")
        if self.find(ask.request_id, ask.attempt) is not None:
            return Refused(f"{ask.request_id} attempt {ask.attempt} already has a ticket")
        kinds = [k.kind for k in ask.expected]
        if not kinds or len(set(kinds)) != len(kinds):
            raise ValueError(f"ask.expected = {kinds} must list at least one kind, each once")
        self._serial += 1
        ticket = Ticket(
            ticket_id=TicketId(f"{self._group.agent}/{self._serial}"),
            request_id=ask.request_id,
            attempt=ask.attempt,
            source=ask.source,
            target=self._group,
            blocks=tuple(blocks),
            slot=slot,
            expected=ask.expected,
            deadline_us=ask.deadline_us,
            lease_us=self._lease_us,
        )
        self._entries[ticket.ticket_id] = _Entry(ticket, TicketState.RESERVED, now_us + self._lease_us)
        return ticket

    def find(self, request_id: str, attempt: int) -> Ticket | None:
        """The ticket of this attempt that has not ended."""
        for entry in self._entries.values():
            ticket = entry.ticket
            if (ticket.request_id, ticket.attempt) == (request_id, attempt) and entry.state not in ENDINGS:
                return ticket
        return None

    def receive(self, message: ToTarget, now_us: int) -> tuple[TargetEffect, ...]:
        """What to do about a message from a source; unknown tickets and repeated messages change nothing."""
        if isinstance(message, Renew):
            self._renew(message, now_us)
            return ()
        entry = self._entries.get(message.ticket_id)
        if entry is None:
            return ()
        match message:
            case AbortAcked():
                return self._acked(entry, message.source)
            case Released():
                return self._released(entry)
            case Written():
                return self._written(entry, message)
            case StateArrived():
                return self._state_arrived(entry, message.token_state, now_us)

    def verified(self, ticket_id: TicketId, found: tuple[KindSum, ...], now_us: int) -> tuple[TargetEffect, ...]:
        """Compare what landed with what the source says it wrote and what the ticket expects; admit or abort."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.state is not TicketState.WRITTEN:
            return ()
        fault = _fault(entry.ticket.expected, entry.sums, found)
        if fault:
            return self._end(entry, TicketEvent.ABORT, fault, now_us)
        return self._try_admit(self._put(entry, TicketEvent.VERIFY), now_us)

    def abort(self, ticket_id: TicketId, reason: str, now_us: int) -> tuple[TargetEffect, ...]:
        """End a ticket from this side (client gone, re-routed). An admitted sequence is the scheduler's to abort."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.state in ENDINGS:
            return ()
        return self._end(entry, TicketEvent.ABORT, reason, now_us)

    def source_lost(self, source: Group, now_us: int) -> tuple[TargetEffect, ...]:
        """Epochs of `source` up to this one can write no more: end their tickets, lift their quarantine."""
        self._dead[source.name] = max(source.epoch, self._dead.get(source.name, -1))
        effects: list[TargetEffect] = []
        for entry in list(self._entries.values()):
            if entry.ticket.source.name != source.name or entry.ticket.source.epoch > source.epoch:
                continue
            if entry.state in ENDINGS:
                effects += self._lift(entry)
            else:
                effects += self._end(entry, TicketEvent.LOSE_SOURCE, f"source {source.agent} lost", now_us)
        return tuple(effects)

    def wake(self, now_us: int) -> tuple[TargetEffect, ...]:
        """Expire what is over and repeat what was not acknowledged; call at `wake_us()` or later."""
        effects: list[TargetEffect] = []
        for entry in list(self._entries.values()):
            if entry.state not in ENDINGS and entry.expiry_us <= now_us:
                over = "deadline" if entry.ticket.deadline_us <= now_us else "lease"
                effects += self._end(entry, TicketEvent.EXPIRE, f"{over} over", now_us)
            elif entry.resend_us is not None and entry.resend_us <= now_us:
                effects.append(self._tell(entry, now_us))
        return tuple(effects)

    def wake_us(self) -> int | None:
        """When `wake` has something to do at the latest; None while there is nothing to wait for."""
        times = [e.expiry_us for e in self._entries.values() if e.state not in ENDINGS]
        times += [e.resend_us for e in self._entries.values() if e.resend_us is not None]
        return min(times, default=None)

    def heartbeats(self) -> tuple[Send, ...]:
        """One Renew for each source with open tickets, in order of names; send every third of a lease."""
        by_source: dict[Group, list[TicketId]] = {}
        for entry in self._entries.values():
            if entry.state not in ENDINGS:
                by_source.setdefault(entry.ticket.source, []).append(entry.ticket.ticket_id)
        return tuple(Send(to, Renew(self._group, tuple(ids))) for to, ids in sorted(by_source.items()))

    def tickets(self) -> tuple[tuple[Ticket, TicketState], ...]:
        """Open tickets and, with an ending as state, quarantined ones."""
        return tuple((e.ticket, e.state) for e in self._entries.values())

    def held_blocks(self) -> tuple[int, ...]:
        """Blocks this ledger owns now: reserved or quarantined, not yet admitted."""
        return tuple(b for e in self._entries.values() if e.state is not TicketState.ADMITTED for b in e.ticket.blocks)

    def _put(self, entry: _Entry, *events: TicketEvent) -> _Entry:
        moved = replace(entry, state=advance(entry.state, *events))
        self._entries[entry.ticket.ticket_id] = moved
        return moved

    def _renew(self, message: Renew, now_us: int) -> None:
        for ticket_id in message.ticket_ids:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.ticket.source != message.sender or entry.state in ENDINGS:
                continue
            renewed = replace(entry, lease_end_us=max(entry.lease_end_us, now_us + self._lease_us))
            self._entries[ticket_id] = renewed
            if entry.state is TicketState.RESERVED:
                self._put(renewed, TicketEvent.WRITE)

    def _written(self, entry: _Entry, message: Written) -> tuple[TargetEffect, ...]:
        if entry.state not in _MAY_BE_WRITTEN:
            return ()
        start = (TicketEvent.WRITE,) if entry.state is TicketState.RESERVED else ()
        self._put(replace(entry, sums=message.sums), *start, TicketEvent.WRITTEN)
        return (Verify(entry.ticket),)

    def _state_arrived(self, entry: _Entry, token_state: TokenState, now_us: int) -> tuple[TargetEffect, ...]:
        if entry.token_state is not None or entry.state in ENDINGS:
            return ()
        informed = replace(entry, token_state=token_state)
        self._entries[entry.ticket.ticket_id] = informed
        return self._try_admit(informed, now_us)

    def _try_admit(self, entry: _Entry, now_us: int) -> tuple[TargetEffect, ...]:
        if entry.state is not TicketState.VERIFIED or entry.token_state is None:
            return ()
        admitted = self._put(entry, TicketEvent.ADMIT)
        return (Admit(entry.ticket, entry.token_state), self._tell(admitted, now_us))

    def _acked(self, entry: _Entry, source: Group) -> tuple[TargetEffect, ...]:
        if entry.ticket.source != source:
            return ()  # another life of that group knows nothing about writes of this one
        if entry.state is TicketState.ADMITTED:
            return self._released(entry)  # too late to abort: what it says is that its own blocks are released
        if entry.state in ENDINGS:
            return self._lift(entry)
        ending = advance(entry.state, TicketEvent.ABORT)
        return (*self._lift(entry), Ended(entry.ticket, ending, SOURCE_ABORTED))

    def _released(self, entry: _Entry) -> tuple[TargetEffect, ...]:
        if entry.state is not TicketState.ADMITTED:
            return ()
        del self._entries[entry.ticket.ticket_id]
        return (Ended(entry.ticket, advance(entry.state, TicketEvent.RELEASE), ""),)

    def _end(self, entry: _Entry, event: TicketEvent, reason: str, now_us: int) -> tuple[TargetEffect, ...]:
        before, ended = entry.state, self._put(entry, event)
        effects: list[TargetEffect] = [Ended(entry.ticket, ended.state, reason)]
        is_source_alive = event is not TicketEvent.LOSE_SOURCE
        if is_source_alive:
            effects.append(self._tell(ended, now_us))
        if before is TicketState.ADMITTED:
            del self._entries[entry.ticket.ticket_id]
        elif before not in _MAY_BE_WRITTEN or not is_source_alive:
            effects += self._lift(ended)
        return tuple(effects)

    def _lift(self, entry: _Entry) -> tuple[TargetEffect, ...]:
        del self._entries[entry.ticket.ticket_id]
        return (FreeReservation(entry.ticket),)

    def _tell(self, entry: _Entry, now_us: int) -> Send:
        ticket = entry.ticket
        self._entries[ticket.ticket_id] = replace(entry, resend_us=now_us + self._resend_us)
        if entry.state is TicketState.ADMITTED:
            return Send(ticket.source, Admitted(ticket.ticket_id, self._group))
        return Send(ticket.source, Abort(ticket.ticket_id, self._group, ticket.deadline_us))


def _fault(expected: tuple[KindBytes, ...], said: tuple[KindSum, ...], found: tuple[KindSum, ...]) -> str:
    """Why a hand-off is not complete; empty if it is."""
    claims, sums = {s.kind: s for s in said}, {s.kind: s for s in found}
    if len(claims) != len(said) or len(sums) != len(found):
        return "a kind is named twice"
    if extra := (claims.keys() | sums.keys()) - {e.kind for e in expected}:
        return f"unexpected kinds {sorted(extra)}"
    for want in expected:
        claim, landed = claims.get(want.kind), sums.get(want.kind)
        if claim is None or claim.byte_count != want.byte_count:
            return f"{want.kind}: {claim.byte_count if claim else 0} of {want.byte_count} bytes written"
        if landed != claim:
            return f"{want.kind}: checksum differs from the source's"
    return ""
