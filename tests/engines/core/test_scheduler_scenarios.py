"""What a NORMAL engine's scheduler promises, one story a test."""

import pytest
from shoal.engines.config import Role
from shoal.engines.core.plan import Accepted, ChunkDone, StepKind, StepResult
from shoal.engines.core.request import FinishEvent, FinishReason, ImageSpan, Rejected, SamplingParams
from shoal.engines.core.scheduler import StepScheduler

from tests.engines.core.desk import EOS, Desk, batch, config_of, next_token, request_of, tokens_in


def image(start, length):
    return ImageSpan(start, length, 1, length - 3, b"digest")


def test_one_request_from_prompt_to_last_token():
    desk = Desk.open()
    assert desk.scheduler.submit(request_of("a", 100, max_tokens=3), 0) == Accepted("a")
    first = desk.step()
    assert (first.kind, batch(first)) == (StepKind.PREFILL, [("a", 0, 64)])
    assert first.items[0].is_fresh
    assert not first.items[0].completes
    assert desk.events == [ChunkDone("a", 64, False)]
    second = desk.step()
    assert batch(second) == [("a", 64, 36)]
    assert second.items[0].completes
    assert second.items[0].end == 100  # borrowed, yet fixed by value
    desk.run_until_idle()
    assert desk.tokens_of("a") == [next_token("a", n) for n in (100, 101, 102)]
    assert desk.events[-1] == FinishEvent("a", FinishReason.LENGTH, 3)
    assert desk.free() == (63, 15)


def test_a_plan_item_gives_the_runner_its_rows():
    desk = Desk.open()
    spans = (image(10, 20), image(70, 8))
    desk.scheduler.submit(request_of("a", 100, images=spans), 0)
    desk.step()
    item = desk.plan().items[0]
    assert item.token_ids == tuple(range(164, 200))
    assert item.lookback(3) == (161, 162, 163)
    assert item.images == (spans[1],)
    assert (item.prompt_len, item.slot, list(item.block_table)) == (100, 1, [1, 2, 3, 4, 5, 6, 7])


def test_decode_rows_see_output_tokens():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 20), 0)
    desk.step()
    desk.step()
    item = desk.plan().items[0]
    assert (item.start, item.rows) == (21, 1)
    assert item.token_ids == (next_token("a", 21),)
    assert item.lookback(3) == (118, 119, next_token("a", 20))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            request_of("a", 257),
            "257 tokens exceed the limit of 256",
        ),
        (request_of("a", 200), "need 13 blocks and the engine has 11"),
        (request_of("a", 100, images=(image(3, 70),)), "takes 70 tokens and a step has room for 64"),
        (request_of("a", 10, outputs=4, max_tokens=4), "leaves nothing to produce"),
        (request_of("a", 10, outputs=11), "prompt_len = -1 must lie in 1..10"),
        (request_of("a", 100, hit_tokens=17), "hit_tokens = 17 must be a multiple of block_tokens = 16"),
        (request_of("a", 100, hit_tokens=96), "must be at most prompt_len - keep = 80"),
        (request_of("a", 100, checkpoints=(32, 16)), "must be positive and strictly ascending"),
        (request_of("a", 100, images=(image(3, 20), image(22, 5))), "must follow the one before"),
    ],
)
def test_what_can_never_run_is_refused_at_once(request_, reason):
    desk = Desk.open(config_of(blocks=12))
    answer = desk.scheduler.submit(request_, 0)
    assert isinstance(answer, Rejected)
    assert reason in answer.reason
    desk.scheduler.check()
    assert not desk.scheduler.has_work


def test_an_empty_prompt_is_refused():
    answer = Desk.open().scheduler.submit(request_of("a", 0), 0)
    assert isinstance(answer, Rejected)
    assert "token_ids is empty" in answer.reason


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 10), 0)
    answer = desk.scheduler.submit(request_of("a", 20), 0)
    assert isinstance(answer, Rejected)
    assert "in use" in answer.reason
    desk.run_until_idle()
    assert len(desk.tokens_of("a")) == 8
    assert desk.scheduler.submit(request_of("a", 20), 0) == Accepted("a")


def test_aborting_a_half_done_prompt_frees_its_memory():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 100), 0)
    desk.step()
    assert desk.free() == (56, 14)
    assert desk.scheduler.abort("a")
    assert not desk.scheduler.abort("a")
    plan = desk.step()
    assert plan.kind is StepKind.DECODE
    assert desk.free() == (63, 15)
    assert desk.ending_of("a") is FinishReason.ABORT


def test_aborting_in_the_open_prefill_step_frees_its_memory_and_pushes_nothing():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 30), 0)
    plan = desk.plan()
    assert desk.scheduler.abort("a")
    desk.commit(plan)
    desk.run_until_idle()
    assert desk.tokens_of("a") == []
    assert desk.ending_of("a") is FinishReason.ABORT
    assert desk.free() == (63, 15)


def test_aborting_a_running_request_reports_it_once():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 30), 0)
    desk.step()
    desk.step()
    desk.scheduler.abort("a")
    desk.run_until_idle()
    assert desk.ending_of("a") is FinishReason.ABORT
    assert len(desk.tokens_of("a")) == 2
    assert desk.free() == (63, 15)


def test_a_dead_request_makes_no_prefill_step():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 30), 0)
    desk.scheduler.abort("a")
    ballot = desk.scheduler.ballot(0)
    assert not ballot.wants
    assert desk.step().kind is StepKind.DECODE
    assert desk.ending_of("a") is FinishReason.ABORT


def test_an_idle_engine_takes_a_request_at_once():
    desk = Desk.open()
    for _ in range(5):
        desk.step()
    desk.scheduler.submit(request_of("a", 30), 0)
    assert desk.step().kind is StepKind.PREFILL


def test_a_busy_engine_takes_it_at_the_interval():
    desk = Desk.open(all_interval=3, any_interval=7)
    desk.scheduler.submit(request_of("a", 30, max_tokens=50), 0)
    desk.step()
    desk.step()
    desk.scheduler.submit(request_of("b", 30, max_tokens=50), 0)
    assert [desk.step().kind for _ in range(3)] == [StepKind.DECODE, StepKind.DECODE, StepKind.PREFILL]


def test_younger_requests_pass_one_that_waits_for_its_image():
    desk = Desk.open()
    desk.scheduler.submit(request_of("v", 30, images=(image(2, 8),)), 0, images_pending=True)
    desk.scheduler.submit(request_of("a", 30), 0)
    plan = desk.step()
    assert batch(plan) == [("a", 0, 30)]
    assert plan.reasons == (("v", "not ready"),)
    assert desk.scheduler.set_schedulable("v")
    assert not desk.scheduler.set_schedulable("gone")
    assert batch(desk.step()) == [("v", 0, 30)]


def test_a_prompt_that_must_wait_for_memory_is_not_overtaken_by_a_new_one():
    desk = Desk.open(config_of(blocks=12, watermark=1.0), overtaken_max=0)
    desk.scheduler.submit(request_of("a", 60), 0)
    desk.step()
    desk.scheduler.submit(request_of("large", 150), 0)
    desk.scheduler.submit(request_of("small", 10), 0)
    plan = desk.step()
    assert plan.kind is StepKind.DECODE
    assert desk.waiting() == ["large", "small"]
    desk.run_until_idle()
    assert desk.ending_of("large") is desk.ending_of("small") is FinishReason.LENGTH


def test_a_half_done_prompt_goes_on_above_the_watermark_and_new_ones_wait():
    desk = Desk.open(config_of(blocks=11, watermark=0.5))
    desk.scheduler.submit(request_of("a", 150), 0)
    desk.step()
    desk.scheduler.submit(request_of("b", 8), 0)
    plan = desk.step()
    assert batch(plan) == [("a", 64, 64)]
    assert batch(desk.step()) == [("a", 128, 22)]
    assert desk.step().kind is StepKind.DECODE
    assert desk.scheduler.ballot(0).reason == "blocks in use are above the watermark"
    assert desk.waiting() == ["b"]


def test_a_full_pool_preempts_only_when_somebody_needs_a_block():
    desk = Desk.open(config_of(blocks=5))
    desk.scheduler.submit(request_of("a", 20), 0)
    desk.scheduler.submit(request_of("b", 26), 0)
    desk.step()
    assert desk.free()[0] == 0
    plan = desk.step()
    assert batch(plan) == [("b", 26, 1), ("a", 20, 1)]
    assert plan.preempted == ()


def test_a_preempted_sequence_is_computed_again_with_the_same_tokens():
    desk = Desk.open(config_of(blocks=5, watermark=1.0), all_interval=2)
    desk.scheduler.submit(request_of("a", 20, max_tokens=30), 0)
    desk.scheduler.submit(request_of("b", 26, max_tokens=20), 0)
    desk.run_until_idle()
    victims = [name for plan in desk.plans for name in plan.preempted]
    assert victims
    assert desk.tokens_of("a") == [next_token("a", 20 + i) for i in range(30)]
    assert desk.tokens_of("b") == [next_token("b", 26 + i) for i in range(20)]
    again = [i for p in desk.plans if p.kind is StepKind.PREFILL for i in p.items if i.request_id == victims[0]]
    assert again[-1].prompt_len == {"a": 20, "b": 26}[victims[0]]
    assert desk.free() == (4, 15)


def test_without_recomputation_the_longest_output_ends_preempted():
    desk = Desk.open(config_of(blocks=5, watermark=1.0, recompute_preempted=False))
    desk.scheduler.submit(request_of("a", 20, max_tokens=30), 0)
    desk.scheduler.submit(request_of("b", 26, max_tokens=20), 0)
    desk.run_until_idle()
    endings = {name: desk.ending_of(name) for name in "ab"}
    assert sorted(endings.values()) == [FinishReason.LENGTH, FinishReason.PREEMPTED]


def test_a_constrained_sequence_is_not_recomputed():
    desk = Desk.open(config_of(blocks=5, watermark=1.0))
    for name, length in (("a", 20), ("b", 26)):
        desk.scheduler.submit(request_of(name, length, max_tokens=30), 0)
        desk.scheduler.set_constrained(name)
    desk.run_until_idle()
    assert FinishReason.PREEMPTED in (desk.ending_of("a"), desk.ending_of("b"))


@pytest.mark.parametrize(
    ("sampling", "token", "ending"),
    [
        (SamplingParams(max_tokens=9), EOS, FinishReason.STOP),
        (SamplingParams(max_tokens=9, ignore_eos=True), EOS, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(7,)), 7, FinishReason.STOP),
        (SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True), 7, FinishReason.STOP),
        (SamplingParams(max_tokens=1), 50, FinishReason.LENGTH),
        (SamplingParams(max_tokens=1, stop_token_ids=(50,)), 50, FinishReason.STOP),
        (SamplingParams(max_tokens=9), 50, None),
    ],
)
def test_stop_rules(sampling, token, ending):
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 10, sampling=sampling), 0)
    desk.step({"a": token})
    assert desk.ending_of("a") is ending
    assert desk.tokens_of("a") == [token]


def test_a_sequence_ends_when_it_passes_the_model_length():
    desk = Desk.open(config_of(max_model_len=20))
    desk.scheduler.submit(request_of("a", 18, max_tokens=99), 0)
    desk.run_until_idle()
    assert len(desk.tokens_of("a")) == 3
    assert desk.ending_of("a") is FinishReason.LENGTH


def test_a_rerouted_request_counts_output_from_the_client_prompt():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 24, outputs=4, max_tokens=6), 0)
    desk.run_until_idle()
    assert [index for index, _ in tokens_in(desk.events)] == [4, 5]
    assert desk.events[-1] == FinishEvent("a", FinishReason.LENGTH, 6)


def test_chunks_end_at_checkpoints_and_say_so():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 60, checkpoints=(16, 48)), 0)
    desk.run_until_idle()
    assert [e for e in desk.events if isinstance(e, ChunkDone)] == [
        ChunkDone("a", 16, True),
        ChunkDone("a", 48, True),
        ChunkDone("a", 60, False),
    ]


def test_no_chunk_ends_inside_an_image():
    desk = Desk.open()
    spans = (image(50, 30), image(80, 60), image(145, 10))
    desk.scheduler.submit(request_of("a", 200, images=spans, checkpoints=(100,)), 0)
    desk.run_until_idle()
    cuts = [e.cached for e in desk.events if isinstance(e, ChunkDone)]
    assert cuts == [50, 80, 144, 200]
    assert not [c for c in cuts for s in spans if s.start < c < s.end]


def test_without_chunking_a_checkpoint_does_not_block_the_queue():
    desk = Desk.open(chunked_prefill=False)
    assert isinstance(desk.scheduler.submit(request_of("long", 65), 0), Rejected)
    desk.scheduler.submit(request_of("a", 60, checkpoints=(16,)), 0)
    assert batch(desk.step()) == [("a", 0, 60)]


def test_misaligned_budgets_refuse_what_they_cannot_hold_whole():
    desk = Desk.open(config_of(step_tokens_max=63), chunked_prefill=False, chunk_alignment=8)
    answer = desk.scheduler.submit(request_of("a", 60), 0)
    assert isinstance(answer, Rejected)
    assert "limit of 56" in answer.reason
    desk.scheduler.submit(request_of("b", 50), 0)
    assert batch(desk.step()) == [("b", 0, 50)]


def test_keys_are_charged_by_chunk():
    """A long prompt's last small chunk leaves room for others: only the keys it attends count."""
    desk = Desk.open(sum_k_max=256)
    desk.scheduler.submit(request_of("a", 200), 0)
    desk.scheduler.submit(request_of("b", 100), 0)
    for _ in range(3):
        desk.step()
    assert batch(desk.step()) == [("a", 192, 8), ("b", 0, 56)]


def test_a_request_that_fails_alone_ends_alone():
    desk = Desk.open()
    for name in ("a", "b"):
        desk.scheduler.submit(request_of(name, 10), 0)
    desk.step()
    plan = desk.plan()
    desk.commit(plan, failed=[("a", "the sampler met no finite logit")])
    desk.run_until_idle()
    assert FinishEvent("a", FinishReason.ERROR, 1, "the sampler met no finite logit") in desk.events
    assert len(desk.tokens_of("b")) == 8


def test_a_result_that_does_not_fit_changes_nothing():
    desk = Desk.open()
    desk.scheduler.submit(request_of("a", 10), 0)
    plan = desk.plan()
    with pytest.raises(ValueError, match="2 sampled tokens for 1 planned items"):
        desk.scheduler.commit(plan, StepResult([5, 6]), 0)
    with pytest.raises(ValueError, match="11 drafts accepted of 9 verified"):
        desk.scheduler.commit(plan, StepResult([5], accepted=[[7] * 11]), 0)
    desk.commit(plan)
    assert desk.running() == ["a"]


def test_a_second_plan_before_the_commit_is_a_defect_of_the_caller():
    desk = Desk.open()
    desk.plan()
    with pytest.raises(AssertionError, match="step 1 is open"):
        desk.scheduler.plan(StepKind.DECODE, 0)


@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({"step_tokens_max": 3}, {}, "step_tokens_max = 3 must be at least sequences_max \\* \\(1 \\+ drafts\\) = 4"),
        ({}, {"sum_k_max": 100}, "sum_k_max = 100 must be at least the longest prompt, 256"),
        ({"watermark": 0.0}, {}, "watermark = 0.0 must lie in"),
        ({}, {"drafts": 16}, "must be at least sequences_max|drafts = 16 must be less than block_tokens = 16"),
        ({}, {"all_interval": 0}, "all_interval = 0 must be at least 1"),
    ],
)
def test_settings_that_would_stall_are_refused(changes, rules, message):
    with pytest.raises(ValueError, match=message):
        Desk.open(config_of(**changes), **rules)


def test_a_scheduler_for_encoders_does_not_exist():
    with pytest.raises(ValueError, match="role = encoder has no sequences"):
        StepScheduler(config_of(role=Role.ENCODER), EOS)


def test_accepted_drafts_are_pushed_in_order_and_blocks_are_taken_ahead():
    desk = Desk.open(drafts=3)
    desk.scheduler.submit(request_of("a", 12, max_tokens=6), 0)
    desk.step()
    plan = desk.plan()
    assert batch(plan) == [("a", 12, 4)]
    assert list(plan.items[0].block_table) == [1]
    desk.scheduler.commit(plan, StepResult([503], accepted=[[501, 502]]), 0)
    plan = desk.plan()
    assert (batch(plan), list(plan.items[0].block_table)) == ([("a", 15, 4)], [1, 2])
    events = desk.scheduler.commit(plan, StepResult([509], accepted=[[504, 505, 506]]), 0)
    assert tokens_in(events) == [(4, 504), (5, 505)]
    assert events[-1] == FinishEvent("a", FinishReason.LENGTH, 6)
