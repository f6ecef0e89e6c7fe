"""Tickets of a prompt engine: which writes are in flight, when it may acknowledge an abort, when its blocks are free.

An abort is acknowledged only when no write of the ticket is in flight, and a ticket that ended here is never written
again, even if it arrives a second time. A write that failed after it was posted may still land, so nothing is
acknowledged to that epoch of the target any more: the connection is broken and needs a new epoch.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.cluster.core.handoff import (
    ENDINGS,
    Abort,
    AbortAcked,
    Admitted,
    Ended,
    Group,
    Refused,
    Released,
    Renew,
    Send,
    Ticket,
    TicketEvent,
    TicketId,
    TicketState,
    ToSource,
    advance,
)


class WriteEnd(StrEnum):
    """How a granted write ended. A deadline that passes is no end: the write is still in flight."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The ticket is known here and may be written."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Granted:
    """One write may be posted; report its end with `end_write`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Effect: no write reads the source's blocks and slot of this ticket any more; stop or release the sequence."""

    ticket: Ticket
    state: TicketState


@dataclass(frozen=True, slots=True)
class ConnectionBroken:
    """Effect: a posted write to `target` failed; if `target` lives on, this side needs a new epoch."""

    target: Group


SourceEffect = ReleaseSource | ConnectionBroken | Send | Ended


@dataclass(frozen=True, slots=True)
class _Entry:
    ticket: Ticket
    state: TicketState
    lease_end_us: int
    in_flight: int = 0
    is_last_posted: bool = False
    is_admitted: bool = False

    @property
    def expiry_us(self) -> int:
        return min(self.lease_end_us, self.ticket.deadline_us)


class SourceLedger:
    """All tickets of one prompt engine in one epoch."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._entries: dict[TicketId, _Entry] = {}
        self._ended: dict[TicketId, int] = {}  # until its deadline, after which `accept` refuses by the clock
        self._dead: dict[str, int] = {}
        self._broken: set[Group] = set()

    def accept(self, ticket: Ticket, now_us: int) -> Accepted | Refused:
        """Take a ticket to write under; repeated while open it is the same ticket, after its end it is refused."""
        if ticket.source != self._group:
            return Refused(f"ticket {ticket.ticket_id} is for {ticket.source.agent}, this is {self._group.agent}")
        if ticket.ticket_id in self._ended:
            return Refused(f"ticket {ticket.ticket_id} has ended")
        if ticket.deadline_us <= now_us:
            return Refused(f"deadline of ticket {ticket.ticket_id} is over")
        if self._is_dead(ticket.target):
            return Refused(f"target {ticket.target.agent} is dead")
        if ticket.target in self._broken:
            return Refused(f"connection to {ticket.target.agent} is broken")
        entry = self._entries.get(ticket.ticket_id)
        if entry is None:
            self._entries[ticket.ticket_id] = _Entry(ticket, TicketState.RESERVED, now_us + ticket.lease_us)
        elif entry.state in ENDINGS:
            return Refused(f"ticket {ticket.ticket_id} has ended")
        return Accepted(ticket)

    def start_write(self, ticket_id: TicketId, is_last: bool, now_us: int) -> Granted | Refused:
        """Permission to post one write now.

        The last write carries the `Written` notification and promises that everything landed, so it may start
        only when every earlier write has ended; nothing may be written after it.
        """
        entry = self._entries.get(ticket_id)
        if entry is None or entry.state in ENDINGS:
            return Refused(f"ticket {ticket_id} has ended")
        if entry.ticket.deadline_us <= now_us:
            return Refused(f"deadline of ticket {ticket_id} is over")
        if entry.is_last_posted:
            raise ValueError(f"ticket {ticket_id}: the last write was already posted, nothing may follow it")
        if is_last and entry.in_flight:
            raise ValueError(f"ticket {ticket_id}: {entry.in_flight} writes in flight must end before the last starts")
        start = (TicketEvent.WRITE,) if entry.state is TicketState.RESERVED else ()
        state = advance(entry.state, *start)
        self._entries[ticket_id] = replace(entry, state=state, in_flight=entry.in_flight + 1, is_last_posted=is_last)
        return Granted(entry.ticket)

    def end_write(self, ticket_id: TicketId, end: WriteEnd, reason: str, now_us: int) -> tuple[SourceEffect, ...]:
        """A granted write ended."""
        entry = self._entries.get(ticket_id)
        assert entry is not None, f"{ticket_id}: a write ended of a ticket that is not here"
        assert entry.in_flight > 0, f"{ticket_id}: a write ended but {entry.in_flight} are in flight"
        entry = self._put(replace(entry, in_flight=entry.in_flight - 1))
        effects: list[SourceEffect] = []
        if entry.is_admitted:
            end = WriteEnd.DONE  # the target verified the bytes, whatever the handle says
        if end is WriteEnd.FAILED and not self._is_dead(entry.ticket.target):
            self._broken.add(entry.ticket.target)
            effects.append(ConnectionBroken(entry.ticket.target))
        if entry.state not in ENDINGS:
            if end is not WriteEnd.DONE:
                return (*effects, *self._end(entry, TicketEvent.ABORT, f"write {end}: {reason}"))
            if entry.is_last_posted:
                entry = self._put(replace(entry, state=advance(entry.state, TicketEvent.WRITTEN)))
        return (*effects, *self._settle(entry))

    def receive(self, message: ToSource, now_us: int) -> tuple[SourceEffect, ...]:
        """What to do about a message from a target; each may come late, twice, or before the ticket itself."""
        match message:
            case Renew():
                self._renew(message, now_us)
                return ()
            case Abort():
                return self._abort_asked(message, now_us)
            case Admitted():
                return self._admitted(message)

    def abort(self, ticket_id: TicketId, reason: str) -> tuple[SourceEffect, ...]:
        """End a ticket from this side (client gone, prompt failed); the target hears of it once writes ended."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.state in ENDINGS:
            return ()
        return self._end(entry, TicketEvent.ABORT, reason)

    def target_lost(self, target: Group) -> tuple[SourceEffect, ...]:
        """Epochs of `target` up to this one are dead; blocks are released once the port ended their writes."""
        self._dead[target.name] = max(target.epoch, self._dead.get(target.name, -1))
        self._broken = {g for g in self._broken if g.name != target.name or g.epoch > target.epoch}
        effects: list[SourceEffect] = []
        for entry in list(self._entries.values()):
            is_theirs = entry.ticket.target.name == target.name and entry.ticket.target.epoch <= target.epoch
            if is_theirs and entry.state not in ENDINGS:
                effects += self._end(entry, TicketEvent.LOSE_TARGET, f"target {target.agent} lost")
        return tuple(effects)

    def wake(self, now_us: int) -> tuple[SourceEffect, ...]:
        """Expire what is over and forget endings that the clock refuses by now; call at `wake_us()` or later."""
        effects: list[SourceEffect] = []
        for entry in list(self._entries.values()):
            if entry.state not in ENDINGS and entry.expiry_us <= now_us:
                over = "deadline" if entry.ticket.deadline_us <= now_us else "lease"
                effects += self._end(entry, TicketEvent.EXPIRE, f"{over} over")
        self._ended = {i: until for i, until in self._ended.items() if until > now_us}
        return tuple(effects)

    def wake_us(self) -> int | None:
        """When `wake` has something to do at the latest; None while there is nothing to wait for."""
        times = [e.expiry_us for e in self._entries.values() if e.state not in ENDINGS]
        return min([*times, *self._ended.values()], default=None)

    def heartbeats(self) -> tuple[Send, ...]:
        """One Renew for each target with open tickets, in order of names; send every third of a lease."""
        by_target: dict[Group, list[TicketId]] = {}
        for entry in self._entries.values():
            if entry.state not in ENDINGS:
                by_target.setdefault(entry.ticket.target, []).append(entry.ticket.ticket_id)
        return tuple(Send(to, Renew(self._group, tuple(ids))) for to, ids in sorted(by_target.items()))

    def tickets(self) -> tuple[tuple[Ticket, TicketState], ...]:
        """Tickets whose source blocks are not released yet; one with an ending still has writes in flight."""
        return tuple((e.ticket, e.state) for e in self._entries.values())

    def _is_dead(self, target: Group) -> bool:
        return target.epoch <= self._dead.get(target.name, -1)

    def _put(self, entry: _Entry) -> _Entry:
        self._entries[entry.ticket.ticket_id] = entry
        return entry

    def _renew(self, message: Renew, now_us: int) -> None:
        for ticket_id in message.ticket_ids:
            entry = self._entries.get(ticket_id)
            if entry is not None and entry.ticket.target == message.sender:
                lease_end_us = max(entry.lease_end_us, now_us + entry.ticket.lease_us)
                self._put(replace(entry, lease_end_us=lease_end_us))

    def _abort_asked(self, message: Abort, now_us: int) -> tuple[SourceEffect, ...]:
        entry = self._entries.get(message.ticket_id)
        if entry is not None:
            if entry.state in ENDINGS:
                return ()  # its acknowledgement follows when the writes have ended
            return self._end(entry, TicketEvent.ABORT, "target aborted")
        if message.target in self._broken:
            return ()
        if message.deadline_us > now_us:
            self._ended[message.ticket_id] = message.deadline_us
        return (Send(message.target, AbortAcked(message.ticket_id, self._group)),)

    def _admitted(self, message: Admitted) -> tuple[SourceEffect, ...]:
        entry = self._entries.get(message.ticket_id)
        if entry is None:
            return (Send(message.target, Released(message.ticket_id)),)
        return self._settle(self._put(replace(entry, is_admitted=True)))

    def _end(self, entry: _Entry, event: TicketEvent, reason: str) -> tuple[SourceEffect, ...]:
        ended = self._put(replace(entry, state=advance(entry.state, event)))
        return (Ended(entry.ticket, ended.state, reason), *self._settle(ended))

    def _settle(self, entry: _Entry) -> tuple[SourceEffect, ...]:
        """Release and answer if the ticket is over and no write reads this side's memory any more."""
        state, ticket = entry.state, entry.ticket
        if entry.in_flight:
            return ()
        if state is TicketState.WRITTEN and entry.is_admitted:
            state = advance(state, TicketEvent.VERIFY, TicketEvent.ADMIT, TicketEvent.RELEASE)
        if state not in ENDINGS:
            return ()
        del self._entries[ticket.ticket_id]
        self._ended[ticket.ticket_id] = ticket.deadline_us
        release = ReleaseSource(ticket, state)
        if entry.is_admitted:
            return (release, Send(ticket.target, Released(ticket.ticket_id)))
        if state is TicketState.TARGET_LOST or ticket.target in self._broken:
            return (release,)
        return (release, Send(ticket.target, AbortAcked(ticket.ticket_id, self._group)))
