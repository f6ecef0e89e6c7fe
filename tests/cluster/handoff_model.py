"""A small world of two real ledgers and every fault between them, as immutable states for exhaustive search."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.cluster.core.handoff import (
    ENDINGS,
    Ended,
    Group,
    Kind,
    KindBytes,
    KindSum,
    Refused,
    Send,
    StateArrived,
    Ticket,
    Written,
)
from shoal.cluster.core.source_ledger import (
    Accepted,
    ConnectionBroken,
    Granted,
    ReleaseSource,
    SourceLedger,
    WriteEnd,
)
from shoal.cluster.core.target_ledger import Admit, Ask, FreeReservation, TargetLedger, Verify
from shoal.engines.core.request import EngineRequest, SamplingParams, TokenState

SOURCE, TARGET = Group("prefill/0", 1), Group("decode/0", 1)
KINDS = (KindBytes(Kind.MAIN, 8),)
SUMS = (KindSum(Kind.MAIN, 8, 77),)
STATE = TokenState(EngineRequest("r", (1, 2), 2, SamplingParams()), (1, 2, 3))
LEASE_US, RESEND_US, DEADLINE_US = 1, 1, 2


@dataclass(frozen=True)
class Write:
    """A posted write. `ended`: the source saw its end; a FAILED one that has not landed still may."""

    is_last: bool
    has_landed: bool = False
    ended: WriteEnd | None = None


@dataclass(frozen=True)
class Faults:
    """How many faults of each sort may still happen on a path."""

    drop: int = 0
    repeat: int = 0
    fail: int = 0
    abort: int = 0
    lose_source: int = 0
    lose_target: int = 0


class ViolationError(AssertionError):
    pass


@dataclass
class State:
    """One node of the search; forked, never changed after it was reached."""

    source: SourceLedger
    target: TargetLedger
    ticket: Ticket
    faults: Faults
    source_us: int = 0
    target_us: int = 0
    to_source: tuple[Any, ...] = ()  # messages under way; a bag, any may be next
    to_target: tuple[Any, ...] = ()
    writes: tuple[Write, ...] = ()
    posted_blocks: bool = False
    is_source_alive: bool = True
    is_target_alive: bool = True
    target_memory: str = "reserved"  # reserved, free, sequence
    source_memory: str = "none"  # none, held, free
    target_endings: int = 0

    def fork(self, **changes: Any) -> "State":
        return replace(self, source=_fork(self.source), target=_fork(self.target), **changes)

    def key(self) -> tuple[Any, ...]:
        """Equal for states with equal futures: past the deadline only the time until a repeat counts."""
        bags = frozenset(self.to_source), frozenset(self.to_target)
        clocks = self.source_us, min(self.target_us, DEADLINE_US)
        alive = self.is_source_alive, self.is_target_alive
        memory = self.target_memory, self.source_memory, self.target_endings
        ledgers = _freeze(self.source, self.source_us), _freeze(self.target, self.target_us)
        return (*bags, *clocks, *alive, *memory, *ledgers, self.faults, self.writes, self.posted_blocks)

    @property
    def is_quiet(self) -> bool:
        """Nothing is held for the ticket anywhere that lives."""
        source_done = not self.is_source_alive or (not self.source.tickets() and self.source_memory != "held")
        target_done = not self.is_target_alive or (not self.target.tickets() and self.target_memory != "reserved")
        return source_done and target_done

    def check(self) -> None:
        """What must hold in every state."""
        may_land = [w for w in self.writes if not w.has_landed and w.ended in (None, WriteEnd.FAILED)]
        if may_land and self.is_source_alive and self.is_target_alive and self.target_memory != "reserved":
            raise ViolationError(f"{may_land} can land in memory that is {self.target_memory}")
        if any(w.ended is None for w in self.writes) and self.is_source_alive and self.source_memory == "free":
            raise ViolationError("a write in flight reads source memory that is free")
        held = bool(self.target.held_blocks())
        if held != (self.target_memory == "reserved"):
            raise ViolationError(f"ledger holds blocks: {held}, but the memory is {self.target_memory}")
        if self.target_memory == "sequence" and not any(w.is_last and w.has_landed for w in self.writes):
            raise ViolationError("admitted before the last write landed")
        if self.target_endings > 1:
            raise ViolationError(f"ended {self.target_endings} times at the target")


def first(faults: Faults) -> State:
    target = TargetLedger(TARGET, LEASE_US, RESEND_US)
    ticket = target.open(Ask("r", 0, SOURCE, KINDS, DEADLINE_US), (3, 4), 1, 0)
    assert isinstance(ticket, Ticket)
    return State(SourceLedger(SOURCE), target, ticket, faults, to_source=(ticket,))


def steps(state: State) -> Iterator[tuple[str, State]]:
    """Every state that one event leads to, with the event's name."""
    yield from _message_steps(state)
    if state.is_source_alive:
        yield from _write_steps(state)
    yield from _abort_steps(state)
    yield from _loss_steps(state)
    yield from _ticks(state)


def _ticks(state: State) -> Iterator[tuple[str, State]]:
    """Time passes on one side only: clocks may be skewed without limit. Past the deadline, only if all else rests.

    There are no heartbeats here: that a lease was renewed is the path on which the tick comes later.
    """
    rests = not (state.is_quiet or state.to_source or state.to_target)
    if state.is_target_alive and (state.target_us < DEADLINE_US or rests):
        following = state.fork(target_us=state.target_us + 1)
        perform(following, following.target.wake(following.target_us), by_target=True)
        yield "target ticks", following
    if state.is_source_alive and state.source_us < DEADLINE_US:
        following = state.fork(source_us=state.source_us + 1)
        perform(following, following.source.wake(following.source_us))
        yield "source ticks", following


def _message_steps(state: State) -> Iterator[tuple[str, State]]:
    for side in ("to_source", "to_target"):
        bag = getattr(state, side)
        for place in range(len(bag)):
            rest = {side: bag[:place] + bag[place + 1 :]}
            yield f"deliver {side} {bag[place]}", _delivered(state.fork(**rest), side, bag[place])
            if state.faults.drop and not isinstance(bag[place], str):  # deaths are told until they are heard
                yield f"drop {bag[place]}", state.fork(**rest, faults=replace(state.faults, drop=state.faults.drop - 1))
            if state.faults.repeat:
                faults = replace(state.faults, repeat=state.faults.repeat - 1)
                yield f"deliver and keep {bag[place]}", _delivered(state.fork(faults=faults), side, bag[place])


def _delivered(state: State, side: str, message: Any) -> State:
    if side == "to_source" and state.is_source_alive:
        if isinstance(message, Ticket):
            if isinstance(state.source.accept(message, state.source_us), Accepted):
                if state.source_memory == "free":
                    raise ViolationError("a ticket was accepted after its end")
                state.source_memory = "held"
        elif message == "target died":
            perform(state, state.source.target_lost(TARGET))
            # The port ends writes to a removed peer.
            for place, write in enumerate(state.writes):
                if write.ended is None:
                    _end(state, place, WriteEnd.FAILED)
        else:
            perform(state, state.source.receive(message, state.source_us))
    if side == "to_target" and state.is_target_alive:
        if message == "source died":
            perform(state, state.target.source_lost(SOURCE, state.target_us), by_target=True)
        else:
            perform(state, state.target.receive(message, state.target_us), by_target=True)
    return state


def _write_steps(state: State) -> Iterator[tuple[str, State]]:
    open_here = {t.ticket_id for t, s in state.source.tickets() if s not in ENDINGS}
    in_flight = any(w.ended is None for w in state.writes)
    has_last = any(w.is_last for w in state.writes)
    wanted = [False] if not state.posted_blocks else [True] if not in_flight and not has_last else []
    for is_last in wanted if state.ticket.ticket_id in open_here else []:
        following = state.fork()
        granted = following.source.start_write(state.ticket.ticket_id, is_last, state.source_us)
        if isinstance(granted, Granted):
            following.writes = (*following.writes, Write(is_last))
            following.posted_blocks = True
            yield f"write last={is_last}", following
        else:
            assert isinstance(granted, Refused)
    for place, write in enumerate(state.writes):
        if not write.has_landed and write.ended in (None, WriteEnd.FAILED) and state.is_target_alive:
            yield f"land {place}", _landed(state.fork(), place)
        if write.ended is None and write.has_landed:
            following = state.fork()
            _end(following, place, WriteEnd.DONE)
            yield f"done {place}", following
        if write.ended is None and state.faults.fail:
            following = state.fork(faults=replace(state.faults, fail=state.faults.fail - 1))
            _end(following, place, WriteEnd.FAILED)
            yield f"fail {place}", following


def _landed(state: State, place: int) -> State:
    write = replace(state.writes[place], has_landed=True)
    state.writes = (*state.writes[:place], write, *state.writes[place + 1 :])
    if write.is_last:
        state.to_target = (*state.to_target, Written(state.ticket.ticket_id, SUMS))
        if not any(isinstance(m, StateArrived) for m in state.to_target):
            state.to_target = (*state.to_target, StateArrived(state.ticket.ticket_id, STATE))
    return state


def _end(state: State, place: int, end: WriteEnd) -> None:
    write = replace(state.writes[place], ended=end)
    state.writes = (*state.writes[:place], write, *state.writes[place + 1 :])
    perform(state, state.source.end_write(state.ticket.ticket_id, end, "", state.source_us))


def _abort_steps(state: State) -> Iterator[tuple[str, State]]:
    if not state.faults.abort:
        return
    faults = replace(state.faults, abort=state.faults.abort - 1)
    if state.is_target_alive:
        following = state.fork(faults=faults)
        effects = following.target.abort(state.ticket.ticket_id, "client gone", state.target_us)
        perform(following, effects, by_target=True)
        yield "abort at target", following
    if state.is_source_alive:
        following = state.fork(faults=faults)
        perform(following, following.source.abort(state.ticket.ticket_id, "client gone"))
        yield "abort at source", following


def _loss_steps(state: State) -> Iterator[tuple[str, State]]:
    """A death is a message of the membership, which may come late but is never lost or repeated here."""
    if state.is_source_alive and state.faults.lose_source:
        faults = replace(state.faults, lose_source=0)
        yield (
            "lose source",
            state.fork(faults=faults, is_source_alive=False, to_source=(), to_target=(*state.to_target, "source died")),
        )
    if state.is_target_alive and state.faults.lose_target:
        faults = replace(state.faults, lose_target=0)
        yield (
            "lose target",
            state.fork(faults=faults, is_target_alive=False, to_target=(), to_source=(*state.to_source, "target died")),
        )


def perform(state: State, effects: Iterable[Any], by_target: bool = False) -> None:
    """The shells of both engines: carry out what a ledger (the target's, or the source's) asked for."""
    for effect in effects:
        match effect:
            case Send(to, message):
                side, alive = ("to_source", state.is_source_alive) if to == SOURCE else ("to_target", True)
                bag = getattr(state, side)
                if alive and message not in bag:
                    setattr(state, side, (*bag, message))
            case FreeReservation():
                _move(state, "target_memory", "reserved", "free")
            case Admit():
                _move(state, "target_memory", "reserved", "sequence")
            case Verify(ticket):
                perform(state, state.target.verified(ticket.ticket_id, SUMS, state.target_us), by_target=True)
            case ReleaseSource():
                _move(state, "source_memory", "held", "free")
            case Ended(_, _, _):
                state.target_endings += by_target
            case ConnectionBroken(target):
                assert target == TARGET


def _move(state: State, field: str, before: str, after: str) -> None:
    if getattr(state, field) != before:
        raise ViolationError(f"{field} is {getattr(state, field)}, cannot become {after}")
    setattr(state, field, after)


def _fork(ledger: Any) -> Any:
    twin = copy.copy(ledger)
    for name, value in vars(ledger).items():
        if isinstance(value, dict | set):
            setattr(twin, name, value.copy())
    return twin


def _freeze(ledger: Any, now_us: int) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in vars(ledger).values():
        if isinstance(value, dict):
            parts.append(frozenset((k, _relative(v, now_us)) for k, v in value.items()))
        else:
            parts.append(frozenset(value) if isinstance(value, set) else value)
    return tuple(parts)


def _relative(entry: Any, now_us: int) -> Any:
    resend_us = getattr(entry, "resend_us", None)
    return entry if resend_us is None else replace(entry, resend_us=resend_us - now_us)
