"""Drafts from the step that makes them to the step that verifies them: slots, pads, rates, counters, events."""

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.config import Role
from shoal.engines.core.drafts import accept_rates
from shoal.engines.core.plan import StepResult
from shoal.engines.core.request import FinishEvent, FinishReason, TokenLogprobs, TokensEvent, TokenState

from tests.engines.core.desk import EOS, Desk, batch, config_of, next_token, request_of


class All:
    """A chooser that verifies every draft; that there is one makes the scheduler keep acceptance rates."""

    def choose(self, sequences):
        return [1 + len(one.drafts) for one in sequences]


def slots(plan):
    return [(i.request_id, i.read_slot, i.write_slot) for i in plan.items]


def started(*names, drafts=2, verify=None, **rules):
    """A desk whose prompts are computed; the next step is their first decode step."""
    desk = Desk.open(verify=verify, drafts=drafts, all_interval=1, **rules)
    for name in names:
        desk.scheduler.submit(request_of(name, 10, max_tokens=40), 0)
    desk.step()
    return desk


def test_pads_are_verified_after_a_prompt_and_drafts_after_that():
    desk = started("a", pad_token_id=9)
    prefill = desk.plans[0]
    assert slots(prefill) == [("a", 0, 1)]
    plan = desk.plan()
    assert slots(plan) == [("a", 0, 1)]
    assert plan.items[0].token_ids == (next_token("a", 10), 9, 9)
    desk.scheduler.commit(plan, StepResult([70], drafts=[[71, 72]]), 0)
    plan = desk.plan()
    assert slots(plan) == [("a", 1, 1)]
    assert plan.items[0].token_ids == (70, 71, 72)
    desk.scheduler.commit(plan, StepResult([70]), 0)  # this step made none
    plan = desk.plan()
    assert slots(plan) == [("a", 0, 1)]
    assert plan.items[0].token_ids == (70, 9, 9)


def test_drafts_made_with_a_prompt_are_verified_at_once():
    desk = Desk.open(verify=All(), drafts=2)
    desk.scheduler.submit(request_of("a", 10), 0)
    desk.scheduler.commit(desk.plan(), StepResult([70], drafts=[[71, 72]], confidences=[[0.5, 0.5]]), 0)
    plan = desk.plan()
    assert slots(plan) == [("a", 1, 1)]
    assert plan.items[0].token_ids == (70, 71, 72)
    assert plan.items[0].sequence.accept_rates == (0.5, 0.25)


def test_rates_are_running_products_and_move_on():
    desk = started("a", verify=All())
    sequence = desk.plans[0].items[0].sequence
    assert (sequence.accept_rates, sequence.prev_accept_rates) == ((), ())
    assert (sequence.schedule_count, sequence.process_count) == (1, 1)
    plan = desk.plan()
    assert (sequence.schedule_count, sequence.process_count) == (2, 1)
    desk.scheduler.commit(plan, StepResult([7], drafts=[[1, 2]], confidences=[[0.5, 0.5]]), 0)
    assert (sequence.accept_rates, sequence.prev_accept_rates) == ((0.5, 0.25), ())
    desk.scheduler.commit(desk.plan(), StepResult([7], drafts=[[1, 2]], confidences=[[0.25, 1.0]]), 0)
    assert (sequence.accept_rates, sequence.prev_accept_rates) == ((0.25, 0.25), (0.5, 0.25))
    desk.scheduler.commit(desk.plan(), StepResult([7], drafts=[[1, 2]]), 0)
    assert (sequence.accept_rates, sequence.prev_accept_rates) == ((), (0.25, 0.25))
    assert (sequence.schedule_count, sequence.process_count) == (4, 4)


@given(st.lists(st.sampled_from([(), (0.0,) * 3, (1.0, 0.5, 0.1), (0.3, 0.7, 1e-9)]), max_size=6))
def test_rates_are_the_products_that_a_loop_makes(confidences):
    assert accept_rates(confidences) == [tuple(accumulate(row, mul)) for row in confidences]


def test_the_lowest_slot_is_taken_and_comes_back_at_the_end():
    desk = started("a", "b", "c")
    assert sorted(slots(desk.step())) == [("a", 0, 1), ("b", 0, 2), ("c", 0, 3)]
    for name in ("c", "a"):
        desk.scheduler.abort(name)
    desk.step()
    for name in ("d", "e"):
        desk.scheduler.submit(request_of(name, 10, max_tokens=9), 0)
    assert slots(desk.step()) == [("d", 0, 1), ("e", 0, 3)]
    desk.run_until_idle()
    desk.scheduler.ledger.draft_slots.check(())


def test_a_preempted_sequence_starts_again_without_drafts():
    desk = Desk.open(config_of(blocks=7, max_model_len=96, recompute_preempted=True), drafts=2, all_interval=100)
    desk.scheduler.submit(request_of("a", 28, max_tokens=30), 0)
    desk.scheduler.submit(request_of("b", 28, max_tokens=30), 0)
    while not (plan := desk.step()).preempted:
        assert not desk.ending_of("a")
    sequence = desk.scheduler.ledger.sequences[plan.preempted[0]]
    assert (sequence.drafts, sequence.draft_slot, sequence.has_draft_info) == ((), 0, False)
    assert (sequence.schedule_count, sequence.process_count) == (0, 0)
    assert sequence.accept_rates == sequence.prev_accept_rates == ()
    desk.run_until_idle()
    for name in ("a", "b"):
        assert desk.tokens_of(name) == [next_token(name, 28 + i) for i in range(30)]


def test_an_arrived_sequence_verifies_pads_first():
    desk = Desk.open(config_of(role=Role.COMPLETION), drafts=2, pad_token_id=9)
    request = request_of("a", 20, max_tokens=9)
    reservation = desk.scheduler.reserve("a", 21, 0)
    desk.scheduler.admit(reservation, TokenState(request, (*request.token_ids, next_token("a", 20))), 0)
    plan = desk.plan()
    assert slots(plan) == [("a", 0, 1)]
    assert plan.items[0].token_ids == (next_token("a", 20), 9, 9)


def test_a_chooser_decides_the_rows():
    class Chooser:
        def choose(self, sequences):
            return [3, 1] if len(sequences) == 2 else [2]

    desk = Desk.open(verify=Chooser(), drafts=2)
    desk.scheduler.submit(request_of("b", 9), 0)
    desk.scheduler.submit(request_of("a", 10), 0)
    desk.step()
    plan = desk.plan()
    assert batch(plan) == [("a", 10, 3), ("b", 9, 1)]
    with pytest.raises(ValueError, match="b: 1 drafts accepted of 0 verified"):
        desk.scheduler.commit(plan, StepResult([5, 6], accepted=[[7, 8], [9]]), 0)


@pytest.mark.parametrize("rows", [[0], [4], [1, 1]])
def test_a_choice_that_cannot_be_is_refused(rows):
    class Chooser:
        def choose(self, sequences):
            return rows

    desk = Desk.open(verify=Chooser(), drafts=2)
    desk.scheduler.submit(request_of("a", 10), 0)
    desk.step()
    with pytest.raises(ValueError, match="rows chosen"):
        desk.plan()


def test_accepted_drafts_carry_their_logprobs():
    desk = started("a")
    told = [[TokenLogprobs(-0.25), TokenLogprobs(-0.5)]]
    result = StepResult([7], accepted=[[5, 6]], accepted_logprobs=told, logprobs=[TokenLogprobs(-1.0)])
    events = desk.scheduler.commit(desk.plan(), result, 0)
    told = tuple(map(TokenLogprobs, (-0.25, -0.5, -1.0)))
    assert events == (TokensEvent("a", 1, (5, 6, 7), told),)


def test_what_comes_behind_the_end_is_lost_with_its_logprobs():
    desk = started("a")
    told = [TokenLogprobs(-0.25), TokenLogprobs(-0.5)]
    result = StepResult([7], accepted=[[EOS, 6]], accepted_logprobs=[told], logprobs=[TokenLogprobs(-1.0)])
    events = desk.scheduler.commit(desk.plan(), result, 0)
    assert events == (TokensEvent("a", 1, (EOS,), (told[0],)), FinishEvent("a", FinishReason.STOP, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafts": [[1]]}, "1 drafts were made, must be 0 or drafts = 2"),
        ({"confidences": [[0.5] * 3]}, "3 confidences were made"),
        ({"drafts": [[1, 2], [3, 4]]}, "2 drafts for 1 planned items"),
        ({"accepted": [[5, 6]], "accepted_logprobs": [[TokenLogprobs(0.0)]]}, "1 accepted_logprobs for 2"),
        (
            {"accepted": [[5, 6]], "logprobs": [TokenLogprobs(0.0)]},
            "0 accepted_logprobs for 2 accepted drafts and logp",
        ),
        ({"accepted": [[5]], "accepted_logprobs": [[TokenLogprobs(0.0)]]}, "1 accepted draft.* and no logprobs"),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(fields, message):
    desk = started("a")
    plan = desk.plan()
    with pytest.raises(ValueError, match=message):
        desk.scheduler.commit(plan, StepResult([7], **fields), 0)
    desk.scheduler.commit(plan, StepResult([7]), 0)
    assert desk.scheduler.ledger.sequences["a"].len == 12


def test_a_sequence_that_fails_gives_its_slot_back():
    desk = started("a", "b")
    desk.commit(desk.plan(), failed=[("a", "no finite logits")])
    plan = desk.plan()
    assert slots(plan) == [("b", 2, 2)]
    assert [e.request_id for e in plan.finished] == ["a"]
    desk.commit(plan)
    assert desk.ending_of("a") is FinishReason.ERROR
