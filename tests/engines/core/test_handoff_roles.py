"""PROMPT and COMPLETION engines, and prefixes swapped in from the store."""

import pytest
from shoal.engines.config import Role, TruncationMode
from shoal.engines.core.plan import Accepted, LoadTarget, PromptDone, Reservation, StepKind
from shoal.engines.core.request import FinishReason, NoRoom, Rejected, TokenState

from tests.engines.core.desk import EOS, Desk, batch, config_of, next_token, request_of, tokens_in


def prompt_desk(**changes):
    return Desk.open(config_of(Role.PROMPT, **changes))


def completion_desk(**changes):
    return Desk.open(config_of(Role.COMPLETION, **changes))


def state_of(request, *outputs):
    return TokenState(request, (*request.token_ids, *outputs))


def arrive(desk, request_id, length, max_tokens=8):
    request = request_of(request_id, length, max_tokens=max_tokens)
    reservation = desk.scheduler.reserve(request_id, length + 1, now_us=5)
    assert isinstance(reservation, Reservation)
    assert desk.scheduler.admit(reservation, state_of(request, 900), now_us=9) == Accepted(request_id)
    return reservation


def test_a_prompt_stays_owned_until_it_is_released():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("a", 30), 0)
    desk.step()
    assert desk.events[-1] == PromptDone("a", 30, next_token("a", 30))
    assert not desk.scheduler.has_work
    assert desk.free() == (61, 14)
    assert not desk.scheduler.abort("a")
    assert desk.scheduler.release("a")
    assert not desk.scheduler.release("a")
    assert desk.free() == (63, 15)


def test_prompts_waiting_for_their_handoff_do_not_stop_prefill():
    desk = prompt_desk(sequences_max=2)
    for index in range(6):
        desk.scheduler.submit(request_of(f"p{index}", 30), 0)
    for _ in range(3):
        desk.step()
    assert sorted(desk.scheduler.ledger.handoff) == [f"p{index}" for index in range(6)]
    for index in range(6):
        desk.scheduler.release(f"p{index}")
    assert desk.free() == (63, 15)


def test_a_prompt_that_ends_with_its_first_token_is_not_handed_off():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("a", 30), 0)
    desk.scheduler.submit(request_of("b", 8, max_tokens=1), 0)
    desk.step({"a": EOS})
    assert desk.ending_of("a") is FinishReason.STOP
    assert desk.ending_of("b") is FinishReason.LENGTH
    desk.run_until_idle()
    assert not [e for e in desk.events if isinstance(e, PromptDone)]
    assert desk.free() == (63, 15)


def test_cut_prompts_keep_their_order():
    desk = prompt_desk(step_tokens_max=64)
    for name in "abc":
        desk.scheduler.submit(request_of(name, 40, checkpoints=(16,)), 0)
    plan = desk.step()
    assert batch(plan) == [("a", 0, 16), ("b", 0, 16), ("c", 0, 16)]
    assert desk.waiting() == ["a", "b", "c"]


def test_a_prompt_engine_never_decodes_and_a_completion_engine_never_prefills():
    with pytest.raises(ValueError, match="a prompt engine cannot plan a decode step"):
        prompt_desk().scheduler.plan(StepKind.DECODE, 0)
    with pytest.raises(ValueError, match="reserve and admit instead"):
        completion_desk().scheduler.submit(request_of("a", 5), 0)
    with pytest.raises(ValueError, match="only completion receives"):
        prompt_desk().scheduler.reserve("a", 5, 0)


def test_a_received_prompt_decodes_to_its_end():
    desk = completion_desk()
    reservation = arrive(desk, "a", 30, max_tokens=4)
    assert (reservation.blocks, reservation.slot, reservation.reserved_us) == ((1, 2), 1, 5)
    plan = desk.step()
    assert batch(plan) == [("a", 30, 1)]
    assert plan.items[0].token_ids == (900,)
    desk.run_until_idle()
    assert [index for index, _ in tokens_in(desk.events)] == [1, 2, 3]
    assert desk.ending_of("a") is FinishReason.LENGTH
    assert desk.free() == (63, 15)


def test_a_cancelled_reservation_returns_its_memory_once():
    desk = completion_desk()
    reservation = desk.scheduler.reserve("a", 31, 0)
    assert desk.free() == (61, 14)
    assert desk.scheduler.cancel(reservation)
    assert not desk.scheduler.cancel(reservation)
    assert desk.free() == (63, 15)
    late = desk.scheduler.admit(reservation, state_of(request_of("a", 30), 900), 0)
    assert isinstance(late, Rejected)
    assert "reserve again" in late.reason


def test_an_old_reservation_cannot_use_the_memory_of_a_new_one():
    desk = completion_desk()
    old = desk.scheduler.reserve("a", 31, 0)
    desk.scheduler.cancel(old)
    new = desk.scheduler.reserve("a", 31, 7)
    assert not desk.scheduler.cancel(old)
    assert isinstance(desk.scheduler.admit(old, state_of(request_of("a", 30), 900), 0), Rejected)
    assert desk.scheduler.admit(new, state_of(request_of("a", 30), 900), 0) == Accepted("a")


def test_abort_reaches_reserved_arrived_and_running_requests():
    desk = completion_desk(sequences_max=2)
    desk.scheduler.reserve("reserved", 31, 0)
    arrive(desk, "arrived", 20)
    assert desk.scheduler.abort("reserved")
    assert desk.scheduler.abort("arrived")
    desk.step()
    assert desk.ending_of("arrived") is FinishReason.ABORT
    arrive(desk, "running", 20)
    desk.step()
    desk.scheduler.abort("running")
    desk.run_until_idle()
    assert desk.ending_of("running") is FinishReason.ABORT
    assert desk.free() == (63, 15)


def test_no_room_says_what_is_short():
    desk = completion_desk(blocks=5, slots=3, sequences_max=2)
    assert isinstance(desk.scheduler.reserve("never", 65, 0), Rejected)
    desk.scheduler.reserve("a", 40, 0)
    assert desk.scheduler.reserve("b", 40, 0) == NoRoom(blocks_short=2)
    desk.scheduler.reserve("c", 16, 0)
    assert desk.scheduler.reserve("d", 16, 0) == NoRoom(blocks_short=1, slots_short=1, sequences_short=1)
    assert isinstance(desk.scheduler.reserve("a", 16, 0), Rejected)


def test_a_completion_engine_ends_what_it_preempts_for_the_cluster_to_route_again():
    desk = completion_desk(blocks=5)
    arrive(desk, "a", 30, max_tokens=60)
    arrive(desk, "b", 30, max_tokens=60)
    desk.run_until_idle()
    assert sorted([desk.ending_of("a"), desk.ending_of("b")]) == [FinishReason.LENGTH, FinishReason.PREEMPTED] or (
        desk.ending_of("a") is desk.ending_of("b") is FinishReason.PREEMPTED
    )
    assert desk.free() == (4, 15)


def test_a_state_that_does_not_fit_its_reservation_is_an_error_and_the_reservation_stays():
    desk = completion_desk()
    reservation = desk.scheduler.reserve("a", 31, 0)
    with pytest.raises(ValueError, match="does not fit the reservation of 'a' for 31"):
        desk.scheduler.admit(reservation, state_of(request_of("a", 20), 900), 0)
    assert desk.scheduler.cancel(reservation)


# Prefixes swapped in.


def test_a_hit_is_loaded_while_younger_requests_run():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    desk.scheduler.submit(request_of("a", 10), 0)
    assert desk.scheduler.loads_wanted() == ("hit",)
    target = desk.scheduler.load_hit("hit")
    assert target == LoadTarget("hit", 64, (1, 2, 3, 4), 1)
    assert desk.scheduler.loads_wanted() == ()
    assert batch(desk.step()) == [("a", 0, 10)]
    assert desk.scheduler.hit_loaded("hit", 64)
    plan = desk.step()
    assert batch(plan) == [("hit", 64, 36)]
    assert not plan.items[0].is_fresh
    assert list(plan.items[0].block_table) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("tokens", "first"), [(32, ("hit", 32, 64)), (0, ("hit", 0, 64))])
def test_a_hit_may_turn_out_shorter_or_fail(tokens, first):
    desk = prompt_desk()
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    desk.scheduler.load_hit("hit")
    desk.scheduler.hit_loaded("hit", tokens)
    plan = desk.step()
    assert batch(plan) == [first]
    assert plan.items[0].is_fresh == (tokens == 0)


def test_a_hit_that_is_given_up_before_it_was_loaded_is_computed():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("hit", 60, hit_tokens=32), 0)
    assert desk.step().items == ()
    assert desk.scheduler.hit_loaded("hit", 0)
    assert batch(desk.step()) == [("hit", 0, 60)]


def test_an_aborted_load_is_freed_and_its_late_end_ignored():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    desk.scheduler.load_hit("hit")
    assert desk.scheduler.abort("hit")
    assert not desk.scheduler.hit_loaded("hit", 64)
    desk.step()
    assert desk.free() == (63, 15)
    assert not desk.scheduler.hit_loaded("hit", 64)
    assert isinstance(desk.scheduler.load_hit("hit"), Rejected)


def test_a_load_needs_room_like_everybody():
    desk = prompt_desk(blocks=9)
    desk.scheduler.submit(request_of("a", 60), 0)
    desk.step()
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    assert desk.scheduler.load_hit("hit") == NoRoom(blocks_short=3)
    desk.scheduler.release("a")
    assert isinstance(desk.scheduler.load_hit("hit"), LoadTarget)


def test_what_was_loaded_passes_a_new_prompt_that_waits_for_memory():
    """Otherwise both would wait for ever: the first for blocks, the second, which holds them, for the first."""
    desk = prompt_desk(blocks=9)
    desk.scheduler.submit(request_of("large", 120), 0)
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    desk.scheduler.load_hit("hit")
    desk.scheduler.hit_loaded("hit", 64)
    assert batch(desk.step()) == [("hit", 64, 36)]
    desk.scheduler.release("hit")
    assert batch(desk.step()) == [("large", 0, 64)]


def test_more_tokens_than_asked_for_are_an_error():
    desk = prompt_desk()
    desk.scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    desk.scheduler.load_hit("hit")
    for tokens in (80, 24, -16):
        with pytest.raises(ValueError, match=f"tokens = {tokens} must be a multiple of block_tokens = 16 in 0..64"):
            desk.scheduler.hit_loaded("hit", tokens)


def test_a_hit_needs_truncation():
    config = config_of(Role.PROMPT)
    off = config_of(Role.PROMPT, truncation=type(config.truncation)(TruncationMode.OFF))
    answer = Desk.open(off).scheduler.submit(request_of("hit", 100, hit_tokens=64), 0)
    assert isinstance(answer, Rejected)
    assert "needs truncation" in answer.reason
