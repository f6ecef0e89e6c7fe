"""The order of waiting prompts: priorities, deadlines, users, a full queue, and the bound on being overtaken."""

import pytest
from shoal.engines.core.plan import Accepted, StepKind
from shoal.engines.core.request import FinishEvent, FinishReason, Rejected
from shoal.engines.core.rules import SchedulingRules

from tests.engines.core.desk import Desk, config_of, request_of


def queue(*requests, length=40, config=None, **rules):
    """Requests (name, fields) submitted in order; the order in which their prompts complete."""
    desk = Desk.open(config, all_interval=1, any_interval=1, **rules)
    for name, fields in requests:
        assert isinstance(desk.scheduler.submit(request_of(name, length, max_tokens=4, **fields), 0), Accepted)
    return desk


def order(desk):
    desk.run_until_idle()
    return [i.request_id for plan in desk.plans if plan.kind is StepKind.PREFILL for i in plan.items if i.completes]


def test_alike_requests_keep_their_order():
    assert order(queue(("a", {}), ("b", {}), ("c", {}))) == ["a", "b", "c"]
    same = {"user": "u"}
    assert order(queue(("a", same), ("b", same), ("c", same))) == ["a", "b", "c"]


def test_greater_priority_goes_first():
    assert order(queue(("a", {}), ("b", {"priority": 1}), ("c", {"priority": 2}), ("d", {"priority": 1}))) == [
        "c", "b", "d", "a",
    ]  # fmt: skip


def test_the_earlier_deadline_goes_first_among_equals():
    fields = [("a", {}), ("b", {"deadline_us": 90}), ("c", {"deadline_us": 50}), ("d", {"priority": -1})]
    assert order(queue(*fields)) == ["c", "b", "a", "d"]


def test_a_prompt_that_is_not_begun_by_its_deadline_ends():
    desk = queue(("a", {}), ("b", {"deadline_us": 10}))
    plan = desk.scheduler.plan(StepKind.DECODE, 11)
    assert [(e.request_id, e.reason) for e in plan.dropped] == [("b", FinishReason.ERROR)]
    assert "deadline_us = 10 passed" in plan.dropped[0].detail
    desk.commit(plan)
    assert [e.request_id for e in desk.events if isinstance(e, FinishEvent)] == ["b"]
    assert order(desk) == ["a"]


def test_users_take_turns_by_tokens():
    mine = [(f"a{i}", {"user": "a"}) for i in range(4)]
    assert order(queue(*mine, ("b0", {"user": "b"}), ("b1", {"user": "b"}))) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_user_who_was_away_does_not_come_back_with_a_saved_up_share():
    desk = queue(("a0", {"user": "a"}), ("a1", {"user": "a"}), ("b0", {"user": "b"}))
    desk.step()  # a0, of which a was served 40 tokens
    desk.scheduler.abort("b0")
    desk.step()
    desk.scheduler.submit(request_of("c0", 40, user="c"), 0)
    served = desk.scheduler.ledger.served
    assert served["c"] == served["a"] > 0
    order(desk)
    assert desk.scheduler.ledger.served == {}


def test_a_full_queue_rejects_with_rule_and_remedy():
    desk = queue(("a", {}), ("b", {}), waiting_max=2)
    answer = desk.scheduler.submit(request_of("c", 10), 0)
    assert isinstance(answer, Rejected)
    assert answer.reason.startswith("waiting_max = 2 requests wait already: retry later")
    assert answer.is_full
    never = desk.scheduler.submit(request_of("d", 0), 0)
    assert isinstance(never, Rejected)
    assert not never.is_full, "a prompt that never fits is told so, full queue or not"
    desk.step()
    assert isinstance(desk.scheduler.submit(request_of("c", 10), 0), Accepted)


def test_a_prompt_without_room_is_overtaken_so_often_and_no_more():
    desk = Desk.open(config_of(blocks=12, watermark=1.0), all_interval=1, any_interval=1, overtaken_max=2)
    desk.scheduler.submit(request_of("first", 60, max_tokens=30), 0)
    desk.step()
    desk.scheduler.submit(request_of("large", 150, max_tokens=4), 0)
    for name in ("s1", "s2", "s3", "s4"):
        desk.scheduler.submit(request_of(name, 10, max_tokens=4), 0)
        desk.step()
    begun = [i.request_id for plan in desk.plans if plan.kind is StepKind.PREFILL for i in plan.items]
    assert begun == ["first", "s1", "s2"]
    assert order(desk)[-3:] == ["large", "s3", "s4"]


def test_low_priority_is_not_starved():
    desk = Desk.open(config_of(), all_interval=1, any_interval=1, overtaken_max=3)
    desk.scheduler.submit(request_of("low", 64, max_tokens=2), 0)
    for i in range(8):
        desk.scheduler.submit(request_of(f"high{i}", 64, max_tokens=2, priority=1), 0)
    done = order(desk)
    assert done.index("low") <= 4
    assert len(done) == 9


@pytest.mark.parametrize("name", ["waiting_max", "overtaken_max"])
def test_bounds_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} = -1 must be at least 0"):
        SchedulingRules(**{name: -1})
