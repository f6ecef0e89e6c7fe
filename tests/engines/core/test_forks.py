"""Branches of a sequence: what is shared, what is copied, what is adopted, and that the parent may go on."""

import pytest
from shoal.engines.config import Role
from shoal.engines.core.plan import Accepted, StepResult
from shoal.engines.core.request import FinishReason, NoRoom, Rejected, SamplingParams, TokenState

from tests.engines.core.desk import Desk, config_of, next_token, request_of
from tests.engines.core.memory_model import MemoryModel

PARAMS = SamplingParams(max_tokens=20)


def desk_with(length, max_tokens=8, config=None, **rules):
    """A desk whose one prompt is computed."""
    desk = Desk.open(config, **rules)
    desk.memory = MemoryModel()
    desk.scheduler.submit(request_of("p", length, max_tokens=max_tokens), 0)
    desk.step()
    return desk


def test_a_branch_of_a_running_parent_copies_at_once_and_both_go_on():
    desk = desk_with(20)
    assert isinstance(desk.scheduler.fork("p", "f", PARAMS), Accepted)
    desk.scheduler.check()
    plan = desk.step()
    assert plan.clone_blocks == ((2, 3),)
    assert plan.clone_slots == ((1, 2),)
    assert {i.request_id: list(i.block_table) for i in plan.items} == {"p": [1, 2], "f": [1, 3]}
    desk.run_until_idle()
    assert desk.tokens_of("p") == [next_token("p", 20 + i) for i in range(8)]
    assert desk.tokens_of("f") == [next_token("f", 21 + i) for i in range(19)]
    assert desk.free() == (63, 15)


def test_a_full_last_block_is_shared():
    desk = desk_with(32)
    desk.scheduler.fork("p", "f", PARAMS)
    plan = desk.step()
    assert plan.clone_blocks == ()
    assert desk.scheduler.ledger.blocks.references()[2] == 2
    desk.run_until_idle()
    assert desk.free() == (63, 15)


def test_a_branch_of_a_parent_that_ended_adopts_what_is_its_alone():
    desk = desk_with(20, max_tokens=1, config=config_of(slots=2))
    desk.scheduler.fork("p", "f", PARAMS)
    assert desk.step().items == ()  # the parent still owns its slot, which is the only one
    plan = desk.step()
    assert (plan.clone_blocks, plan.clone_slots) == ((), ())
    assert (list(plan.items[0].block_table), plan.items[0].slot) == ([1, 2], 1)
    desk.run_until_idle()
    assert desk.free() == (63, 1)


def test_branches_that_wait_for_each_other_do_not_wait_for_ever():
    config = config_of(slots=2, recompute_preempted=True)
    desk = desk_with(20, max_tokens=1, config=config)
    for name in ("f", "g", "h"):
        assert isinstance(desk.scheduler.fork("p", name, PARAMS), Accepted)
    desk.run_until_idle()
    for name in ("f", "g", "h"):
        assert desk.tokens_of(name) == [next_token(name, 21 + i) for i in range(19)]
    assert desk.free() == (63, 1)


def test_a_dead_branch_behind_one_that_waits_is_collected():
    desk = desk_with(20, max_tokens=1, config=config_of(slots=2, recompute_preempted=False))
    for name in ("f", "g"):
        desk.scheduler.fork("p", name, PARAMS)
    desk.scheduler.abort("g")
    desk.run_until_idle()
    assert desk.ending_of("g") is FinishReason.ABORT
    assert desk.ending_of("f") is FinishReason.LENGTH
    assert desk.free() == (63, 1)


def test_a_half_done_prompt_branches_and_both_are_computed():
    desk = desk_with(100)
    assert isinstance(desk.scheduler.fork("p", "f", PARAMS), Accepted)
    assert desk.waiting() == ["f", "p"]
    desk.run_until_idle()
    assert desk.tokens_of("p") == [next_token("p", 100 + i) for i in range(8)]
    assert desk.tokens_of("f") == [next_token("f", 100 + i) for i in range(20)]


def test_drafts_of_a_branch_start_as_pads():
    desk = desk_with(20, drafts=2)
    desk.scheduler.fork("p", "f", PARAMS)
    plan = desk.plan()
    assert {i.request_id: (i.token_ids[1:], i.read_slot, i.write_slot) for i in plan.items} == {
        "p": ((0, 0), 0, 1),
        "f": ((0, 0), 0, 2),
    }


def test_no_room_for_the_copy_changes_nothing():
    desk = desk_with(20, config=config_of(slots=2))
    assert desk.scheduler.fork("p", "f", PARAMS) == NoRoom(0, 1)
    desk.scheduler.check()
    desk.run_until_idle()


def test_what_cannot_branch_is_rejected():
    desk = desk_with(20, max_tokens=3)

    def reason(parent, name, params=PARAMS):
        answer = desk.scheduler.fork(parent, name, params)
        assert isinstance(answer, Rejected)
        return answer.reason

    assert "in use" in reason("p", "p")
    assert "nothing computed" in reason("q", "f")
    desk.scheduler.submit(request_of("q", 10), 0)
    assert "nothing computed" in reason("q", "f")
    assert "leaves nothing to produce" in reason("p", "f", SamplingParams(max_tokens=1))
    plan = desk.plan()
    desk.commit(plan)
    desk.scheduler.fork("p", "f", PARAMS)
    assert "copies of its own" in reason("f", "g")
    plan = desk.plan()
    assert "is open" in reason("p", "h")
    desk.commit(plan)
    desk.run_until_idle()


@pytest.mark.parametrize("victim", ["p", "f"])
def test_an_abort_before_the_copy_frees_its_source(victim):
    desk = desk_with(20)
    desk.scheduler.fork("p", "f", PARAMS)
    desk.scheduler.abort(victim)
    desk.run_until_idle()
    assert desk.free() == (63, 15)


def test_a_completion_engine_branches_too():
    desk = Desk.open(config_of(role=Role.COMPLETION))
    request = request_of("a", 20, max_tokens=9)
    desk.scheduler.admit(desk.scheduler.reserve("a", 21, 0), TokenState(request, (*request.token_ids, 7)), 0)
    assert isinstance(desk.scheduler.fork("a", "f", PARAMS), Accepted)
    plan = desk.plan()
    assert sorted(i.request_id for i in plan.items) == ["a", "f"]
    assert plan.clone_slots == ((1, 2),)
    desk.scheduler.commit(plan, StepResult([5, 6]), 0)
    desk.run_until_idle()
    assert desk.free() == (63, 15)
