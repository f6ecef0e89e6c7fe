"""Stories of one request, told with the random programs' world but in order."""

from dataclasses import replace

from shoal.cluster.core import messages as m
from shoal.cluster.core.prompt_scored import EmitScores, PromptScored
from shoal.engines.core.request import FinishReason, PromptScore, Rejected

from tests.machines.request_world import KEEP, POLICY, start


def test_one_request_with_an_image_and_a_hit():
    world = start(matched=24, images=2).run()
    story = world.machine.timeline()
    assert story.route == ("prefill/0", "decode/0")
    assert world.finishes[0].finish.reason is FinishReason.LENGTH
    assert world.finishes[0].cached_tokens == 24 <= 40 - KEEP
    assert {e.image_index for e in world.submits[0].embeddings} == set()
    assert story.handoff_bytes == 100
    world.check_nothing_left()


def test_decode_group_lost_mid_answer():
    """The client sees one uninterrupted answer: the next attempt computes prompt + outputs at the other group."""
    world = start(images=0).run(until=m.Admitted)
    world.receive(world.events.pop(0))
    world.receive(world.events.pop(0))  # two tokens, after the prompt's
    assert len(world.emitted) == 3
    world.lose("decode/0")
    world.run()
    assert [len(s.request.token_ids) for s in world.submits] == [40, 43]
    assert {s.request.prompt_len for s in world.submits} == {40}
    assert world.submits[1].target.name == "decode/1"
    assert len(world.emitted) == 6
    world.check_nothing_left()


def test_source_may_die_after_the_hand_off():
    world = start(images=0).run(until=m.Admitted)
    world.receive(world.events.pop(0))
    world.lose(world.submits[0].group.name)
    world.run()
    assert len(world.submits) == 1


def test_words_of_an_earlier_attempt_are_ignored():
    world = start(images=0).run(until=m.Tokens)
    stale = world.events[0]
    world.lose("prefill/0")
    world.on(stale)
    assert not world.emitted
    world.run()
    assert len(world.emitted) == 6


def test_client_leaves_while_reserved():
    world = start(images=0).run(until=m.Submitted)
    world.on(m.ClientGone())
    assert {e.group.name for e in world.effects if isinstance(e, m.Abort)} == {"prefill/0", "decode/0"}
    world.check_nothing_left()


def test_no_room_is_tried_elsewhere_then_waited_for_then_refused():
    world = start(images=0)
    world.rooms_refused = 3
    world.run()
    assert world.finishes[0].finish is not None
    world = start(images=0)
    world.rooms_refused = 10_000
    world.run()
    assert world.finishes[0].failure.status == 429
    assert world.finishes[0].failure.retry_after_us >= 1_000_000
    world.check_nothing_left()


def test_normal_deployment():
    world = start(replace(POLICY, normal=True), images=1).run()
    assert world.machine.timeline().route == ("prefill/0",)
    world.check_nothing_left()


def test_what_a_client_asks_of_queues_reaches_the_engine():
    """Clients' smaller priority is an engine's greater one; a deadline that only the server set orders nothing."""
    world = start(images=0, priority=-3, user="ann", deadline_us=9_000_000, is_urgent=True).run()
    request = world.submits[0].request
    assert (request.priority, request.user, request.deadline_us) == (3, "ann", 9_000_000)
    assert start(images=0, deadline_us=9_000_000).run().submits[0].request.deadline_us == 0


def test_a_full_queue_is_tried_elsewhere_once_and_is_a_429():
    world = start(images=0)
    for _ in range(2):
        world.run(until=m.Submitted)
        submit, world.events = world.submits[-1], []
        world.held.discard((submit.group, submit.request.request_id))
        ask = submit.ask
        world.on(m.SubmitRejected(ask, Rejected(submit.request.request_id, "waiting_max = 1", is_full=True)))
    assert {s.group.name for s in world.submits} == {"prefill/0", "prefill/1"}
    failure = world.finishes[0].failure
    assert (failure.status, failure.code) == (429, "queue_full")
    assert failure.retry_after_us >= 1_000_000
    world.check_nothing_left()


def test_scores_of_the_prompt_are_waited_for_and_given_once():
    """They come from the PROMPT engine, the end from the COMPLETION engine, in any order."""
    world = start(images=0, matched=24, prompt_logprobs=0).run(until=m.Tokens)
    request, group = world.submits[0].request, world.submits[0].group
    assert (request.hit_tokens, request.checkpoints, request.prompt_logprobs) == (0, (), 0)
    scores = tuple(PromptScore(-float(i), 1) for i in range(40))
    world.on(PromptScored(1, group, 1, scores[1:20]))
    while world.events:
        world.receive(world.events.pop(0))
    assert len(world.emitted) == 6
    assert not world.finishes
    for part in (PromptScored(1, group, 20, scores[20:]), PromptScored(1, group, 1, scores[1:20])):
        world.on(part)
    assert [e.scores for e in world.effects if isinstance(e, EmitScores)] == [scores[1:]]
    assert world.finishes[0].finish is not None
    world.check_nothing_left()


def test_scores_that_are_lost_with_their_engine_are_computed_again_or_missed_aloud():
    world = start(images=0, prompt_logprobs=0).run(until=m.Tokens)
    world.events.clear()
    world.lose("prefill/0")
    world.run(until=m.Tokens)
    assert world.submits[1].request.prompt_logprobs == 0
    while world.events:
        world.receive(world.events.pop(0))
    world.advance(POLICY.gap_us)
    assert (world.finishes[0].failure.status, world.finishes[0].failure.code) == (503, "engines_failed")
    world.check_nothing_left()
