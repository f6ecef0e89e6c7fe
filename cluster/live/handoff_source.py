"""The PROMPT side of hand-offs: posts writes as chunks complete, then the slot and one notification.

Owned by the engine's asyncio loop; checksums and posting run in one worker thread, never in the step loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.cluster.core.handoff import (
    Ended,
    Group,
    Refused,
    Send,
    StateArrived,
    Ticket,
    TicketId,
    ToSource,
    Written,
    encode_written,
)
from shoal.cluster.core.source_ledger import (
    Accepted,
    ConnectionBroken,
    Granted,
    ReleaseSource,
    SourceEffect,
    SourceLedger,
    WriteEnd,
)
from shoal.cluster.core.transfer_plan import Pieces
from shoal.cluster.live.clock import monotonic_s, now_us
from shoal.cluster.live.handoff_bytes import HandoffBytes, HandoffDigest
from shoal.cluster.live.tasks import Tasks
from shoal.cluster.transfer import Done, Lost, NotPosted, Pending, Transfer, WriteHandle
from shoal.engines.run.output import PromptReady

log = logging.getLogger(__name__)

WRITE_WAIT_S = 0.5  # how long one wait for a write's end lasts before the loop looks again
STATE_REPEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class SourcePorts:
    """What the source side asks of its engine. `send` delivers at most once; `release` frees a sequence's memory."""

    transfer: Transfer
    send: Callable[[Group, object], None]
    release: Callable[[Ticket], None]
    ended: Callable[[Ended], None]
    broken: Callable[[Group], None]


@dataclass(slots=True)
class _Outgoing:
    ticket: Ticket
    digest: HandoffDigest
    state: StateArrived | None = None  # once the prompt is done; repeated until the target has released the ticket
    state_sent_s: float = 0.0
    written: int = 0  # places of the block table already given to writes
    jobs: "asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]]" = field(default_factory=asyncio.Queue)


class HandoffSource:
    """All outgoing tickets of one PROMPT engine."""

    def __init__(self, group: Group, layout: HandoffBytes, ports: SourcePorts, checksum: bool) -> None:
        self._ledger = SourceLedger(group)
        self._layout = layout
        self._ports = ports
        self._checksum = checksum
        self._outgoing: dict[TicketId, _Outgoing] = {}
        self._by_sequence: dict[str, TicketId] = {}
        self._work_of: dict[TicketId, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="handoff")

    def accept(self, sequence: str, ticket: Ticket, metadata: bytes) -> str:
        """Take a ticket for a sequence about to be submitted; the reason if that cannot be."""
        answer = self._ledger.accept(ticket, now_us())
        if isinstance(answer, Refused):
            return answer.reason
        assert isinstance(answer, Accepted)
        if ticket.ticket_id not in self._outgoing:
            self._ports.transfer.add_peer(ticket.target.agent, metadata)
            self._outgoing[ticket.ticket_id] = out = _Outgoing(ticket, HandoffDigest(self._checksum))
            self._by_sequence[sequence] = ticket.ticket_id
            self._work_of[ticket.ticket_id] = self._tasks.spawn(self._work(out))
        return ""

    def has(self, sequence: str) -> bool:
        """Whether this sequence has an open ticket here."""
        return sequence in self._by_sequence

    def blocks_ready(self, sequence: str, first: int, blocks: tuple[int, ...]) -> None:
        """Whole blocks from place `first` of the table are final: write them while later chunks compute."""
        out = self._find(sequence)
        if out is not None and blocks:
            assert first == out.written, f"{sequence}: blocks from place {first}, but {out.written} were written"
            out.written += len(blocks)
            targets = out.ticket.blocks[first : first + len(blocks)]
            out.jobs.put_nowait(partial(self._write_blocks, out, blocks, targets))

    def prompt_ready(self, sequence: str, prompt: PromptReady) -> None:
        """The prompt is done: send the state, write the partial block and the slot, notify."""
        if (out := self._find(sequence)) is None:
            return
        out.state = StateArrived(out.ticket.ticket_id, prompt.state)
        self._send_state(out)
        count = self._layout.blocks_for(prompt.state.cached)
        blocks = prompt.blocks[out.written : count]
        if blocks:
            out.jobs.put_nowait(partial(self._write_blocks, out, blocks, out.ticket.blocks[out.written : count]))
        out.written = count
        out.jobs.put_nowait(partial(self._write_slot, out, prompt.slot))

    def abort(self, sequence: str, reason: str) -> None:
        """End the sequence's ticket from this side."""
        if (ticket_id := self._by_sequence.get(sequence)) is not None:
            self._perform(self._ledger.abort(ticket_id, reason))

    def receive(self, message: ToSource) -> None:
        """A message of a target."""
        self._perform(self._ledger.receive(message, now_us()))

    def target_lost(self, target: Group) -> None:
        """A COMPLETION group's life is over."""
        self._ports.transfer.remove_peer(target.agent)
        self._perform(self._ledger.target_lost(target))

    def wake(self) -> None:
        """Expire what is over, repeat states that may have been lost; call a few times a second."""
        self._perform(self._ledger.wake(now_us()))
        for out in self._outgoing.values():
            if out.state is not None and monotonic_s() - out.state_sent_s > STATE_REPEAT_S:
                self._send_state(out)

    def heartbeat(self) -> None:
        """Renew leases; call every third of a lease."""
        for renewal in self._ledger.heartbeats():
            self._ports.send(renewal.to, renewal.message)

    def open_tickets(self) -> int:
        """Tickets whose blocks are not released yet."""
        return len(self._ledger.tickets())

    def close(self) -> None:
        """Stop writing."""
        self._tasks.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _send_state(self, out: _Outgoing) -> None:
        assert out.state is not None
        out.state_sent_s = monotonic_s()
        self._ports.send(out.ticket.target, out.state)

    def _find(self, sequence: str) -> _Outgoing | None:
        ticket_id = self._by_sequence.get(sequence)
        return self._outgoing.get(ticket_id) if ticket_id is not None else None

    async def _work(self, out: _Outgoing) -> None:
        """One ticket's writes, one after the other, until it ends; a job that fails ends the ticket."""
        ticket_id = out.ticket.ticket_id
        try:
            while self._outgoing.get(ticket_id) is out:
                await (await out.jobs.get())()
        except Exception as error:
            log.exception("%s: a write could not be prepared", ticket_id)
            self._perform(self._ledger.abort(ticket_id, f"write: {type(error).__name__}"))

    async def _write_blocks(self, out: _Outgoing, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        def prepare() -> Pieces:
            out.digest.update(self._layout.block_parts(sources))
            return self._layout.block_pieces(sources, targets)

        pieces = await asyncio.get_running_loop().run_in_executor(self._worker, prepare)
        await self._write(out, pieces, None)

    async def _write_slot(self, out: _Outgoing, slot: int) -> None:
        def prepare() -> Pieces:
            out.digest.update(self._layout.slot_parts(slot))
            return self._layout.slot_pieces(slot, out.ticket.slot)

        pieces = await asyncio.get_running_loop().run_in_executor(self._worker, prepare)
        await self._write(out, pieces, encode_written(Written(out.ticket.ticket_id, out.digest.value())))

    async def _write(self, out: _Outgoing, pieces: Pieces, notify: bytes | None) -> None:
        """Post one write under the ledger's grant and report its end; the ledger alone decides what follows."""
        ticket = out.ticket
        grant = self._ledger.start_write(ticket.ticket_id, notify is not None, now_us())
        if not isinstance(grant, Granted):
            return
        loop = asyncio.get_running_loop()
        try:
            handle: WriteHandle = await loop.run_in_executor(
                self._worker, lambda: self._ports.transfer.write(ticket.target.agent, (pieces,), notify)
            )
            state = handle.state()
            while isinstance(state, Pending):
                state = await loop.run_in_executor(self._worker, handle.wait, WRITE_WAIT_S)
        except Exception as error:  # whether it was posted is unknown, so it may land yet
            log.exception("%s: a write failed", ticket.ticket_id)
            state = Lost(f"{type(error).__name__}: {error}")
        match state:
            case Done():
                end, reason = WriteEnd.DONE, ""
            case NotPosted(reason):
                end = WriteEnd.REFUSED
            case Lost(reason):
                end = WriteEnd.FAILED
        self._perform(self._ledger.end_write(ticket.ticket_id, end, reason, now_us()))

    def _perform(self, effects: tuple[SourceEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._ports.send(to, message)
                case ReleaseSource(ticket, _):
                    self._forget(ticket)
                    self._ports.release(ticket)
                case Ended():
                    self._ports.ended(effect)
                case ConnectionBroken(target):
                    self._ports.broken(target)

    def _forget(self, ticket: Ticket) -> None:
        self._outgoing.pop(ticket.ticket_id, None)
        self._by_sequence = {s: t for s, t in self._by_sequence.items() if t != ticket.ticket_id}
        if (task := self._work_of.pop(ticket.ticket_id, None)) is not None and task is not asyncio.current_task():
            task.cancel()
