"""Ticket edges, the ledgers' answers to single messages, and the transfer plan."""

import itertools

import numpy as np
import pytest
from shoal.cluster.core.handoff import (
    EDGES,
    ENDINGS,
    Abort,
    AbortAcked,
    Admitted,
    Ended,
    Group,
    IllegalEdgeError,
    Kind,
    KindBytes,
    KindSum,
    Refused,
    Released,
    Renew,
    Send,
    StateArrived,
    Ticket,
    TicketEvent,
    TicketState,
    Written,
    advance,
    decode_written,
    encode_written,
)
from shoal.cluster.core.source_ledger import Accepted, ConnectionBroken, ReleaseSource, SourceLedger, WriteEnd
from shoal.cluster.core.target_ledger import Admit, Ask, FreeReservation, TargetLedger, Verify
from shoal.cluster.core.transfer_plan import kind_spans, last_blocks, unit_spans, whole_blocks
from shoal.engines.core.request import EngineRequest, SamplingParams, TokenState

SOURCE, TARGET = Group("prefill/0", 1), Group("decode/0", 1)
EXPECTED = (KindBytes(Kind.MAIN, 100), KindBytes(Kind.SLOT_STORED, 7))
SUMS = (KindSum(Kind.MAIN, 100, 11), KindSum(Kind.SLOT_STORED, 7, 22))
STATE = TokenState(EngineRequest("r", (1, 2), 2, SamplingParams()), (1, 2, 3))


def opened(lease_us: int = 100, deadline_us: int = 1000) -> tuple[TargetLedger, Ticket]:
    ledger = TargetLedger(TARGET, lease_us, resend_us=10)
    ticket = ledger.open(Ask("r", 0, SOURCE, EXPECTED, deadline_us), [4, 5], 2, 0)
    assert isinstance(ticket, Ticket)
    return ledger, ticket


def accepted(**times: int) -> tuple[SourceLedger, Ticket]:
    _, ticket = opened(**times)
    ledger = SourceLedger(SOURCE)
    assert ledger.accept(ticket, 0) == Accepted(ticket)
    return ledger, ticket


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TicketState, TicketEvent)))
def test_each_edge_is_legal_or_names_state_and_event(state: TicketState, event: TicketEvent) -> None:
    path = [TicketState(s) for s in ("reserved", "writing", "written", "verified", "admitted", "released")]
    onward = dict(zip(list(TicketEvent)[:5], itertools.pairwise(path), strict=True))
    breaks = {"abort": "aborted", "expire": "expired", "lose source": "source lost", "lose target": "target lost"}
    if event in onward and onward[event][0] is state:
        assert advance(state, event) is onward[event][1]
    elif event in breaks and state in path[:5]:
        assert advance(state, event) == breaks[event]
    else:
        with pytest.raises(IllegalEdgeError, match=f"'{state}' cannot take event '{event}'"):
            advance(state, event)


def test_every_state_that_is_no_ending_has_a_way_out_by_time() -> None:
    assert all((state, TicketEvent.EXPIRE) in EDGES for state in TicketState if state not in ENDINGS)


def test_a_clean_handoff_in_either_order_of_state_and_bytes() -> None:
    for is_state_first in (True, False):
        ledger, ticket = opened()
        early = ledger.receive(StateArrived(ticket.ticket_id, STATE), 1) if is_state_first else ()
        assert early == ()
        assert ledger.receive(Written(ticket.ticket_id, SUMS), 2) == (Verify(ticket),)
        assert ledger.receive(Written(ticket.ticket_id, SUMS), 2) == ()
        effects = ledger.verified(ticket.ticket_id, SUMS, 3)
        if not is_state_first:
            assert effects == ()
            effects = ledger.receive(StateArrived(ticket.ticket_id, STATE), 4)
        told = Send(SOURCE, Admitted(ticket.ticket_id, TARGET))
        assert effects == (Admit(ticket, STATE), told)
        assert ledger.held_blocks() == ()
        assert ledger.wake(20) == (told,)  # repeated until the source answers
        assert ledger.receive(Released(ticket.ticket_id), 21) == (Ended(ticket, TicketState.RELEASED, ""),)
        assert ledger.receive(Released(ticket.ticket_id), 22) == ()
        assert ledger.wake_us() is None


@pytest.mark.parametrize(
    ("said", "found", "reason"),
    [
        (SUMS[:1], SUMS, "slot_stored: 0 of 7 bytes written"),
        (SUMS, SUMS[:1], "slot_stored: checksum differs"),
        ((KindSum(Kind.MAIN, 99, 11), SUMS[1]), SUMS, "main: 99 of 100 bytes written"),
        (SUMS, (KindSum(Kind.MAIN, 100, 12), SUMS[1]), "main: checksum differs"),
        ((*SUMS, KindSum(Kind.INDEX, 1, 1)), SUMS, "unexpected kinds"),
        ((*SUMS, SUMS[0]), SUMS, "a kind is named twice"),
    ],
)
def test_an_incomplete_kind_is_never_admitted(
    said: tuple[KindSum, ...], found: tuple[KindSum, ...], reason: str
) -> None:
    ledger, ticket = opened()
    ledger.receive(StateArrived(ticket.ticket_id, STATE), 1)
    ledger.receive(Written(ticket.ticket_id, said), 1)
    ended, told, freed = ledger.verified(ticket.ticket_id, found, 2)
    assert isinstance(ended, Ended)
    assert reason in ended.reason
    assert told == Send(SOURCE, Abort(ticket.ticket_id, TARGET, 1000))
    assert freed == FreeReservation(ticket)


def test_heartbeats_carry_a_lease_through_any_queue_and_silence_ends_it() -> None:
    ledger, ticket = opened(lease_us=100, deadline_us=10_000)
    for now_us in range(50, 5000, 50):
        ledger.receive(Renew(SOURCE, (ticket.ticket_id,)), now_us)
        assert not any(isinstance(e, Ended) for e in ledger.wake(now_us))
    assert Ended(ticket, TicketState.EXPIRED, "lease over") in ledger.wake(5051)
    assert ledger.held_blocks() == (4, 5)  # quarantined: the source may still write


def test_quarantine_lifts_on_the_right_acknowledgement_only() -> None:
    ledger, ticket = opened()
    ended, told = ledger.abort(ticket.ticket_id, "client gone", 5)
    assert (ended, told) == (
        Ended(ticket, TicketState.ABORTED, "client gone"),
        Send(SOURCE, Abort(ticket.ticket_id, TARGET, 1000)),
    )
    assert ledger.wake(15) == (told,)
    assert ledger.receive(AbortAcked(ticket.ticket_id, Group("prefill/0", 2)), 16) == ()
    assert ledger.receive(Renew(SOURCE, (ticket.ticket_id,)), 16) == ()
    assert ledger.receive(AbortAcked(ticket.ticket_id, SOURCE), 17) == (FreeReservation(ticket),)
    assert ledger.receive(AbortAcked(ticket.ticket_id, SOURCE), 18) == ()


def test_a_dead_source_frees_its_tickets_and_gets_no_new_ones() -> None:
    ledger, ticket = opened()
    assert set(ledger.source_lost(SOURCE, 5)) == {
        Ended(ticket, TicketState.SOURCE_LOST, "source prefill/0-1 lost"),
        FreeReservation(ticket),
    }
    assert isinstance(ledger.open(Ask("r", 1, SOURCE, EXPECTED, 1000), [4], 2, 6), Refused)
    assert isinstance(ledger.open(Ask("r", 1, Group("prefill/0", 2), EXPECTED, 1000), [4], 2, 6), Ticket)


def test_an_abort_waits_for_the_writes_in_flight() -> None:
    ledger, ticket = accepted()
    ledger.start_write(ticket.ticket_id, False, 1)
    abort = Abort(ticket.ticket_id, TARGET, 1000)
    assert ledger.receive(abort, 2) == (Ended(ticket, TicketState.ABORTED, "target aborted"),)
    assert ledger.receive(abort, 3) == ()
    assert isinstance(ledger.start_write(ticket.ticket_id, False, 3), Refused)
    acked = Send(TARGET, AbortAcked(ticket.ticket_id, SOURCE))
    assert ledger.end_write(ticket.ticket_id, WriteEnd.DONE, "", 4) == (
        ReleaseSource(ticket, TicketState.ABORTED),
        acked,
    )
    assert ledger.receive(abort, 5) == (acked,)
    assert isinstance(ledger.accept(ticket, 6), Refused)


def test_an_abort_that_overtakes_its_ticket_is_remembered_until_the_deadline() -> None:
    _, ticket = opened()
    ledger = SourceLedger(SOURCE)
    assert ledger.receive(Abort(ticket.ticket_id, TARGET, 1000), 1) == (
        Send(TARGET, AbortAcked(ticket.ticket_id, SOURCE)),
    )
    assert isinstance(ledger.accept(ticket, 2), Refused)
    assert ledger.wake_us() == 1000
    ledger.wake(1000)
    assert ledger.wake_us() is None
    assert ledger.accept(ticket, 1000) == Refused(f"deadline of ticket {ticket.ticket_id} is over")


def test_a_failed_write_is_never_acknowledged() -> None:
    """It may still land; only the end of this epoch lifts the target's quarantine."""
    ledger, ticket = accepted()
    ledger.start_write(ticket.ticket_id, False, 1)
    effects = ledger.end_write(ticket.ticket_id, WriteEnd.FAILED, "reset", 2)
    assert ConnectionBroken(TARGET) in effects
    assert ReleaseSource(ticket, TicketState.ABORTED) in effects
    assert not any(isinstance(e, Send) for e in effects)
    assert ledger.receive(Abort(ticket.ticket_id, TARGET, 1000), 3) == ()


def test_the_admission_may_overtake_the_last_writes_end() -> None:
    ledger, ticket = accepted()
    ledger.start_write(ticket.ticket_id, True, 1)
    assert ledger.receive(Admitted(ticket.ticket_id, TARGET), 2) == ()
    assert ledger.end_write(ticket.ticket_id, WriteEnd.DONE, "", 3) == (
        ReleaseSource(ticket, TicketState.RELEASED),
        Send(TARGET, Released(ticket.ticket_id)),
    )


def test_the_last_write_is_last_and_starts_alone() -> None:
    ledger, ticket = accepted()
    ledger.start_write(ticket.ticket_id, False, 1)
    with pytest.raises(ValueError, match="1 writes in flight must end"):
        ledger.start_write(ticket.ticket_id, True, 1)
    ledger.end_write(ticket.ticket_id, WriteEnd.DONE, "", 2)
    ledger.start_write(ticket.ticket_id, True, 3)
    with pytest.raises(ValueError, match="nothing may follow"):
        ledger.start_write(ticket.ticket_id, False, 3)


def test_written_survives_its_encoding_and_foreign_bytes_are_refused() -> None:
    _, ticket = opened()
    message = Written(ticket.ticket_id, SUMS)
    assert decode_written(encode_written(message)) == message
    for raw in (b"", b"\xff", b"[]", b'{"ticket":"x","sums":[["nothing",1,2]]}', encode_written(message)[:-4]):
        assert isinstance(decode_written(raw), Refused)


def test_neighbours_on_both_sides_merge_and_others_do_not() -> None:
    assert unit_spans([1, 2, 3, 5], [7, 8, 4, 5], 10).tolist() == [[10, 70, 20], [30, 40, 10], [50, 50, 10]]
    assert unit_spans([], [], 10).shape == (0, 3)
    with pytest.raises(ValueError, match="must pair up"):
        unit_spans([1], [], 10)


def test_merged_spans_copy_the_same_bytes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sources, targets = rng.permutation(12), rng.permutation(12)
        pool, direct, merged = rng.integers(0, 256, 36), np.zeros(36), np.zeros(36)
        for s, t in zip(sources, targets, strict=True):
            direct[3 * t : 3 * t + 3] = pool[3 * s : 3 * s + 3]
        for s, t, n in unit_spans(sources.tolist(), targets.tolist(), 3).tolist():
            merged[t : t + n] = pool[s : s + n]
        assert (direct == merged).all()


@pytest.mark.parametrize("cuts", [(0, 300), (0, 128, 129, 300), (0, 1, 255, 256, 300), (128, 300)])
def test_chunks_and_the_last_piece_cover_each_block_once(cuts: tuple[int, ...]) -> None:
    chunks = [list(whole_blocks(a, b, 128)) for a, b in itertools.pairwise(cuts)]
    places = [p for chunk in chunks for p in chunk]
    assert [*places, *last_blocks(300 // 128, 300, 128)] == list(range(cuts[0] // 128, 3))


def test_kind_spans_follow_unit_order_and_merge() -> None:
    assert kind_spans([(0, 4), (6, 2)], [3, 1], 8).tolist() == [[24, 4], [30, 2], [8, 4], [14, 2]]
    assert kind_spans([(0, 8)], [1, 2], 8).tolist() == [[8, 16]]
    with pytest.raises(ValueError, match="inside a unit of 8 bytes"):
        kind_spans([(6, 3)], [0], 8)
