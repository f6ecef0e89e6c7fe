"""Decode steps planned behind an open one: what happens to a sequence while its last step is in flight."""

import pytest
from shoal.engines.core.plan import Accepted, StepKind, StepResult
from shoal.engines.core.request import FinishReason

from tests.engines.core.desk import batch, config_of, next_token, request_of
from tests.engines.core.pipeline_desk import PipelineDesk


class Chooser:
    """Verifies one draft of everybody."""

    def choose(self, sequences):
        return [2] * len(sequences)


def running(*lengths, drafts=2, max_tokens=40, config=None, verify=None, **rules):
    """A desk with one decode step in flight."""
    desk = PipelineDesk.open(config, verify, drafts=drafts, pipelined=True, all_interval=100, **rules)
    for name, length in zip("abcd", lengths, strict=False):
        desk.scheduler.submit(request_of(name, length, max_tokens=max_tokens), 0)
    assert desk.step().kind is StepKind.PREFILL
    assert desk.step().kind is StepKind.DECODE
    return desk


def test_two_steps_are_open_at_most_and_only_in_decode():
    desk = running(10)
    assert desk.scheduler.may_plan
    plan = desk.plan()
    assert plan.behind == plan.step - 1
    assert not desk.scheduler.may_plan
    with pytest.raises(AssertionError, match="is open: commit it"):
        desk.scheduler.plan(StepKind.DECODE, 0)
    desk.commit()
    assert desk.scheduler.open_steps == 1
    desk.flush()
    desk.scheduler.submit(request_of("b", 10), 0)
    desk.scheduler.plan(StepKind.PREFILL, 0)
    assert not desk.scheduler.may_plan


def test_without_the_rule_a_step_is_committed_before_the_next():
    desk = PipelineDesk.open(drafts=2)
    desk.scheduler.submit(request_of("a", 10), 0)
    desk.plan()
    assert not desk.scheduler.may_plan


def test_a_plan_starts_where_full_acceptance_would_lead_until_it_is_fixed_up():
    desk = running(10)
    plan = desk.plan()
    assert batch(plan) == [("a", 13, 3)]
    assert plan.items[0].token_ids == ()
    with pytest.raises(AssertionError, match="waits for the commit of step"):
        desk.scheduler.fix_up(plan)
    before = desk.flying[0]
    desk.scheduler.commit(before.plan, StepResult([7], accepted=[[5]], drafts=[[8, 9]]), 0)
    with pytest.raises(AssertionError, match="fix it up first"):
        desk.scheduler.commit(plan, StepResult([7]), 0)
    fixed = desk.scheduler.fix_up(plan)
    assert batch(fixed) == [("a", 12, 3)]
    assert (fixed.items[0].token_ids, fixed.items[0].read_slot, fixed.behind) == ((7, 8, 9), 1, 0)
    assert desk.scheduler.fix_up(fixed) is fixed


@pytest.mark.parametrize("rows", [[2, 1], [2], [4, 0], [1, 1]])
def test_rows_that_are_no_spread_of_the_plan_are_refused(rows):
    desk = running(10, 10, verify=Chooser())
    plan = desk.plan()
    desk.scheduler.commit(desk.flying[0].plan, desk.flying[0].result, 0)
    with pytest.raises(ValueError, match=r"must spread 4 rows over 2 items, 1\.\.3 each"):
        desk.scheduler.fix_up(plan, rows)
    assert [i.rows for i in desk.scheduler.fix_up(plan, [1, 3]).items] == [1, 3]


def test_a_sequence_that_ends_in_flight_wastes_its_next_step_and_frees_after_it():
    desk = running(10, 20, drafts=0, max_tokens=3)
    free = desk.free()
    desk.step()  # commits the step before: two tokens each
    desk.plan()
    desk.commit()  # the third: both ended, and the step planned behind computes them once more
    assert [i.request_id for i in desk.flying[0].plan.items] == ["b", "a"]
    assert desk.ending_of("a") is FinishReason.LENGTH
    plan = desk.plan()
    assert [e.request_id for e in plan.finished] == ["b", "a"]
    assert desk.free() == free
    desk.commit()  # the wasted step; only now may their blocks be somebody else's
    assert desk.free() == (63, 15)
    assert desk.tokens_of("a") == [next_token("a", 10 + i) for i in range(3)]
    desk.flush()
    assert not desk.scheduler.has_work


def test_an_abort_in_flight_is_reported_once_and_pushes_nothing():
    desk = running(10, 20)
    assert desk.scheduler.abort("a")
    plan = desk.plan()
    assert [e.request_id for e in plan.finished] == ["a"]
    assert [i.request_id for i in plan.items] == ["b"]
    desk.commit()
    assert len(desk.tokens_of("a")) == 1
    assert desk.ending_of("a") is FinishReason.ABORT
    assert isinstance(desk.scheduler.submit(request_of("a", 5), 0), Accepted)
    desk.run_until_idle()
    assert desk.tokens_of("b") == [next_token("b", 20 + i) for i in range(40)]


def test_a_preempted_sequence_is_computed_again_and_loses_what_was_in_flight():
    desk = running(28, 28, max_tokens=30, config=config_of(blocks=7, max_model_len=96, recompute_preempted=True))
    while not (plan := desk.step()).preempted:
        assert not desk.ending_of("a")
    assert plan.behind
    desk.run_until_idle()
    for name in ("a", "b"):
        assert desk.tokens_of(name) == [next_token(name, 28 + i) for i in range(30)]


def test_blocks_taken_ahead_for_drafts_that_fail_come_back():
    desk = PipelineDesk.open(drafts=5, pipelined=True)
    desk.scheduler.submit(request_of("a", 20, max_tokens=40), 0)
    desk.step()
    none = StepResult([7], drafts=[[0] * 5])
    first = desk.scheduler.plan(StepKind.DECODE, 0)
    behind = desk.scheduler.plan(StepKind.DECODE, 0)
    assert len(behind.items[0].block_table) == 2  # 21 tokens, 6 in flight and 5 drafts
    desk.scheduler.commit(first, none, 0)
    third = desk.scheduler.fix_up(behind)
    desk.scheduler.plan(StepKind.DECODE, 0)
    assert len(third.items[0].block_table) == 3  # 22 + 6 + 5
    desk.scheduler.commit(third, none, 0)
    desk.scheduler.commit(desk.scheduler.fix_up(desk.scheduler._open[0]), none, 0)
    assert len(desk.scheduler.plan(StepKind.DECODE, 0).items[0].block_table) == 2  # 24 + 5, nothing in flight


def test_a_prompt_behind_a_decode_step_is_committed_in_place():
    desk = running(10)
    desk.scheduler.submit(request_of("b", 10), 0)
    plan = desk.scheduler.plan(StepKind.PREFILL, 0)
    assert (plan.behind, batch(plan)) == (0, [("b", 0, 10)])
    desk.scheduler.commit(desk.flying[0].plan, desk.flying[0].result, 0)
    assert desk.scheduler.fix_up(plan) is plan
    desk.scheduler.commit(plan, StepResult([7]), 0)
    after = desk.scheduler.plan(StepKind.DECODE, 0)
    assert (after.behind, sorted(i.request_id for i in after.items)) == (0, ["a", "b"])
