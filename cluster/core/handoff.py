"""The hand-off ticket all parties agree on, its states and legal edges, and the messages about it.

A prompt engine (the source) writes the KV of one finished prompt into memory that a completion engine (the target)
reserved for it. The ticket names that memory. Both sides keep a ledger of tickets (`target_ledger`, `source_ledger`)
and talk by the messages below, each of which may arrive late, twice, out of order or never.

Times are microseconds of one clock scale (Unix time): skew between machines costs patience, never safety.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from shoal.engines.core.request import TokenState

TicketId = NewType("TicketId", str)


class Kind(StrEnum):
    """What a hand-off carries, checked kind by kind: an engine that lost one kind must not pass as complete."""

    MAIN = "main"
    INDEX = "index"
    SLOT_STORED = "slot_stored"
    SLOT_DROPPED = "slot_dropped"


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """One engine group in one life; a restart or a reconnect is a new epoch."""

    name: str
    epoch: int

    @property
    def agent(self) -> str:
        """Name of its transfer agent: unique for each epoch, since a reused name is refused by NIXL."""
        return f"{self.name}-{self.epoch}"


@dataclass(frozen=True, slots=True)
class KindBytes:
    """How many bytes of one kind a complete hand-off holds."""

    kind: Kind
    byte_count: int


@dataclass(frozen=True, slots=True)
class KindSum:
    """Bytes and checksum of one kind, taken in the order of the ticket's blocks."""

    kind: Kind
    byte_count: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission for `source` to write into `blocks` and `slot` of `target`; made by the target's ledger.

    `ticket_id` is never used again in any epoch. `expected` lists each kind once. Nothing may be written after
    `deadline_us`. `lease_us` is how long either side believes in the other without a `Renew`.
    """

    ticket_id: TicketId
    request_id: str
    attempt: int
    source: Group
    target: Group
    blocks: tuple[int, ...]
    slot: int
    expected: tuple[KindBytes, ...]
    deadline_us: int
    lease_us: int


class TicketState(StrEnum):
    """Where a ticket is; the last five are endings."""

    RESERVED = "reserved"
    WRITING = "writing"
    WRITTEN = "written"
    VERIFIED = "verified"
    ADMITTED = "admitted"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"
    SOURCE_LOST = "source lost"
    TARGET_LOST = "target lost"


class TicketEvent(StrEnum):
    """What may happen to a ticket."""

    WRITE = "write"
    WRITTEN = "written"
    VERIFY = "verify"
    ADMIT = "admit"
    RELEASE = "release"
    ABORT = "abort"
    EXPIRE = "expire"
    LOSE_SOURCE = "lose source"
    LOSE_TARGET = "lose target"


ENDINGS = frozenset(
    {
        TicketState.RELEASED,
        TicketState.ABORTED,
        TicketState.EXPIRED,
        TicketState.SOURCE_LOST,
        TicketState.TARGET_LOST,
    }
)

_ADVANCE = {
    (TicketState.RESERVED, TicketEvent.WRITE): TicketState.WRITING,
    (TicketState.WRITING, TicketEvent.WRITTEN): TicketState.WRITTEN,
    (TicketState.WRITTEN, TicketEvent.VERIFY): TicketState.VERIFIED,
    (TicketState.VERIFIED, TicketEvent.ADMIT): TicketState.ADMITTED,
    (TicketState.ADMITTED, TicketEvent.RELEASE): TicketState.RELEASED,
}
_BREAK = {
    TicketEvent.ABORT: TicketState.ABORTED,
    TicketEvent.EXPIRE: TicketState.EXPIRED,
    TicketEvent.LOSE_SOURCE: TicketState.SOURCE_LOST,
    TicketEvent.LOSE_TARGET: TicketState.TARGET_LOST,
}
EDGES = _ADVANCE | {
    (state, event): ending for state in TicketState if state not in ENDINGS for event, ending in _BREAK.items()
}
"""Every legal edge: the straight path, and from each state before an ending the four ways to break off."""


class IllegalEdgeError(ValueError):
    """An event that the ticket's state does not allow; the state is unchanged."""

    def __init__(self, state: TicketState, event: TicketEvent) -> None:
        legal = sorted(e for s, e in EDGES if s is state)
        super().__init__(f"ticket in state '{state}' cannot take event '{event}'; legal events: {legal or 'none'}")
        self.state = state
        self.event = event


def advance(state: TicketState, *events: TicketEvent) -> TicketState:
    """The state after `events`; raises IllegalEdgeError at the first that is not legal."""
    for event in events:
        following = EDGES.get((state, event))
        if following is None:
            raise IllegalEdgeError(state, event)
        state = following
    return state


@dataclass(frozen=True, slots=True)
class Refused:
    """The ledger will not do this, with the reason; nothing changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Heartbeat, both ways: `sender` still works on (or waits for) these tickets."""

    sender: Group
    ticket_ids: tuple[TicketId, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Source to target, as the transfer's notification: every byte has landed, nothing more will be written."""

    ticket_id: TicketId
    sums: tuple[KindSum, ...]


@dataclass(frozen=True, slots=True)
class StateArrived:
    """Source to target: prompt, first token and sampling."""

    ticket_id: TicketId
    token_state: TokenState


@dataclass(frozen=True, slots=True)
class AbortAcked:
    """Source to target: no write is in flight and none will start, whether or not an abort was asked for."""

    ticket_id: TicketId
    source: Group


@dataclass(frozen=True, slots=True)
class Released:
    """Source to target: the source has released its own blocks; the ticket is history."""

    ticket_id: TicketId


@dataclass(frozen=True, slots=True)
class Abort:
    """Target to source: stop writing and acknowledge. Carries what a source needs that never saw the ticket."""

    ticket_id: TicketId
    target: Group
    deadline_us: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """Target to source: the sequence runs on the target; release your blocks."""

    ticket_id: TicketId
    target: Group


ToTarget = Renew | Written | StateArrived | AbortAcked | Released
ToSource = Renew | Abort | Admitted


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: deliver `message` to `to`, at most once; the ledgers repeat what must arrive."""

    to: Group
    message: ToTarget | ToSource


@dataclass(frozen=True, slots=True)
class Ended:
    """Effect: tell the entrypoint how the ticket ended; after `Admit` this is about the source's blocks only."""

    ticket: Ticket
    state: TicketState
    reason: str


def encode_written(message: Written) -> bytes:
    """The notification's bytes."""
    sums = [[s.kind.value, s.byte_count, s.checksum] for s in message.sums]
    return json.dumps({"ticket": message.ticket_id, "sums": sums}, separators=(",", ":")).encode()


def decode_written(raw: bytes) -> Written | Refused:
    """The message in a notification, or why these bytes are none: they come from another process."""
    try:
        fields = json.loads(raw)
        sums = tuple(KindSum(Kind(kind), int(count), int(checksum)) for kind, count, checksum in fields["sums"])
        return Written(TicketId(str(fields["ticket"])), sums)
    except (ValueError, TypeError, KeyError) as error:
        return Refused(f"notification {raw[:40]!r} is not a written message: {type(error).__name__}: {error}")
