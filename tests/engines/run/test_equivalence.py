"""Serving gives the plain loop's tokens, whatever the chunks, the batch, the placement, the hit or the engine."""

import dataclasses

import pytest
from engine_world import World
from shoal.engines.config import Role, Truncation, TruncationMode
from shoal.engines.core.request import FinishReason, SamplingParams
from shoal.engines.model.decoder import Model

GRAIN = 16
KEEP = 24


@pytest.fixture
def world(narrow: Model, request: pytest.FixtureRequest) -> World:
    return World(narrow, KEEP, GRAIN, seed=sum(request.node.name.encode()))


def anchors_of(length: int) -> tuple[int, ...]:
    """Checkpoints a prompt asks for: the furthest legal hit of its own kind, and its last whole grain."""
    wanted = {(length - KEEP) // GRAIN * GRAIN, length // GRAIN * GRAIN}
    return tuple(sorted(a for a in wanted if a > 0))


@pytest.mark.parametrize("step_tokens_max", [GRAIN, 23, 40, 512])
def test_any_chunk_size_and_batch(world: World, step_tokens_max: int) -> None:
    rank = world.rank(Role.NORMAL, step_tokens_max=step_tokens_max)
    requests = [
        world.request(f"r{i}", length, world.sampling(6), images)
        for i, (length, images) in enumerate([(1, ()), (37, (5,)), (64, ()), (90, (14, 60)), (21, ())])
    ]
    for request in requests:
        world.submit(rank, request)
    rank.run()
    for request in requests:
        assert rank.finished[request.request_id].reason is FinishReason.LENGTH
        assert len(rank.tokens[request.request_id]) == 6
        world.check(request, rank.tokens[request.request_id])


def test_requests_that_join_and_leave_while_others_run(world: World) -> None:
    rank = world.rank(Role.NORMAL, step_tokens_max=32)
    requests = [world.request(f"r{i}", 20 + 9 * i, world.sampling(3 + 2 * i)) for i in range(6)]
    for request in requests:
        world.submit(rank, request)
        for _ in range(3):
            rank.step()
    rank.run()
    for request in requests:
        world.check(request, rank.tokens[request.request_id])


def test_a_preempted_sequence_is_recomputed_to_the_same_tokens(world: World) -> None:
    """Nine blocks of 16 do not hold three sequences that grow to 56 tokens."""
    cache = dataclasses.replace(world.rank(Role.NORMAL).engine.config.cache, blocks_count=10)
    rank = world.rank(Role.NORMAL, cache=cache, watermark=1.0)
    requests = [world.request(f"r{i}", 40, world.sampling(16), (8,)) for i in range(3)]
    for request in requests:
        world.submit(rank, request)
    rank.run()
    recomputed = sum(output.rows for output in rank.outputs) - sum(40 + 15 for _ in requests)
    assert recomputed > 0, "nothing was preempted: the scenario does not test what it says"
    for request in requests:
        assert len(rank.tokens[request.request_id]) == 16
        world.check(request, rank.tokens[request.request_id])


@pytest.mark.parametrize("mode", [TruncationMode.OFF, TruncationMode.MASK])
def test_other_truncation_modes(world: World, mode: TruncationMode) -> None:
    world.truncation = Truncation(mode, KEEP)
    rank = world.rank(Role.NORMAL, step_tokens_max=30)
    requests = [world.request(f"r{i}", length, world.sampling(4), (7,)) for i, length in enumerate([20, 75])]
    for request in requests:
        world.submit(rank, request)
    rank.run()
    for request in requests:
        world.check(request, rank.tokens[request.request_id])


def test_steps_that_begin_right_behind_an_image(world: World) -> None:
    """Engram's look-back stops at the image: in a chunk at its end, two tokens on, and in the first decode steps."""
    rank = world.rank(Role.NORMAL)
    cut = world.request("cut", 40, world.sampling(4), (8,), checkpoints=(16, 18))
    last = world.request("last", 38, world.sampling(4), (30,))
    for request in (cut, last):
        world.submit(rank, request)
    rank.run()
    for request in (cut, last):
        world.check(request, rank.tokens[request.request_id])


@pytest.mark.parametrize("step_tokens_max", [20, 512])
def test_prompts_handed_to_another_engine(world: World, step_tokens_max: int) -> None:
    source = world.rank(Role.PROMPT, step_tokens_max=step_tokens_max)
    target = world.rank(Role.COMPLETION)
    requests = [
        world.request(f"r{i}", length, world.sampling(9), images)
        for i, (length, images) in enumerate([(15, ()), (16, ()), (50, (20,)), (79, ())])
    ]
    for request in requests:
        world.submit(source, request)
    source.run()
    for request in requests:
        world.hand_off(source, target, request.request_id)
        target.step()
    target.run()
    for request in requests:
        tokens = source.tokens[request.request_id] + target.tokens[request.request_id]
        assert len(tokens) == 9
        world.check(request, tokens)
    assert source.engine.capacity().blocks_free == source.engine.capacity().blocks_count


def test_whole_blocks_are_announced_once_and_do_not_change(world: World) -> None:
    """What a chunk announces may be sent while later chunks compute."""
    rank = world.rank(Role.PROMPT, step_tokens_max=20)
    request = world.request("r", 90, world.sampling(2))
    world.submit(rank, request)
    sent: dict[int, bytes] = {}
    while not rank.prompts:
        for chunk in rank.step().chunks:
            for number, block in enumerate(chunk.blocks, chunk.first_block):
                assert number not in sent
                sent[number] = rank.memory.read_block(block)
    assert sorted(sent) == list(range(90 // GRAIN))
    assert all(rank.memory.read_block(rank.prompts["r"].blocks[n]) == data for n, data in sent.items())


@pytest.mark.parametrize("hit", [16, 32, 48, 64])
def test_a_hit_at_each_legal_anchor(world: World, hit: int) -> None:
    """One engine saves; another continues the same text from its grains, also with images on both sides of the hit."""
    saver = world.rank(Role.PROMPT, saves=True)
    first = world.request("first", 88, world.sampling(1), (3, 66), checkpoints=(16, 32, 48, 64, 80))
    world.submit(saver, first)
    saver.run()
    other = world.rank(Role.NORMAL, step_tokens_max=24)
    second = dataclasses.replace(first, request_id="second", sampling=world.sampling(6), hit_tokens=hit, checkpoints=())
    world.submit(other, second)
    other.step()
    world.load_hit(other, second, saver, "first")
    other.run()
    assert sum(o.rows for o in other.outputs) == 88 - hit + 5, "the hit was recomputed"
    world.check(second, other.tokens["second"])


def test_a_hit_on_what_decode_saved(world: World) -> None:
    """A conversation's next turn starts from grains and an anchor that a completion engine saved."""
    source, target = world.rank(Role.PROMPT, saves=True), world.rank(Role.COMPLETION, saves=True)
    first = world.request("first", 40, world.sampling(30), checkpoints=anchors_of(40))
    world.submit(source, first)
    source.run()
    world.hand_off(source, target, "first")
    target.run()
    said = source.tokens["first"] + target.tokens["first"]
    assert {i for _, i in source.grains} == {0, 1}
    assert {i for _, i in target.grains} == {2, 3}
    assert {t for _, t in target.anchors} == {48, 64}
    question = world.request("q", 30, world.sampling(5)).token_ids
    ids = (*first.token_ids, *said, *question)
    saved = world.rank(Role.PROMPT)
    saved.grains, saved.anchors = source.grains | target.grains, source.anchors | target.anchors
    second = dataclasses.replace(first, request_id="second", token_ids=ids, prompt_len=len(ids), hit_tokens=64)
    other = world.rank(Role.NORMAL)
    world.submit(other, dataclasses.replace(second, checkpoints=()))
    world.load_hit(other, second, saved, "first")
    other.run()
    world.check(second, other.tokens["second"])


@pytest.mark.parametrize("produced", [1, 7, 20])
def test_a_rerouted_request_goes_on_with_the_same_tokens(world: World, produced: int) -> None:
    """Its engine is lost; prompt and outputs are prefilled elsewhere, truncation still counts from the prompt."""
    first = world.request("r", 61, world.sampling(24, greedy=False), (30,))
    rank = world.rank(Role.NORMAL)
    world.submit(rank, first)
    rank.run()
    whole = rank.tokens["r"]
    again = dataclasses.replace(first, token_ids=(*first.token_ids, *whole[:produced]))
    source, target = world.rank(Role.PROMPT, step_tokens_max=31), world.rank(Role.COMPLETION)
    world.submit(source, again)
    source.run()
    world.hand_off(source, target, "r")
    target.run()
    assert whole[:produced] + source.tokens["r"] + target.tokens["r"] == whole
    world.check(first, whole)


def test_a_rerouted_request_may_hit_what_was_saved(world: World) -> None:
    saver = world.rank(Role.NORMAL, saves=True)
    first = world.request("r", 70, world.sampling(20), checkpoints=anchors_of(70))
    world.submit(saver, first)
    saver.run()
    whole = saver.tokens["r"]
    hit = (70 - KEEP) // GRAIN * GRAIN
    again = dataclasses.replace(first, token_ids=(*first.token_ids, *whole[:9]), hit_tokens=hit, checkpoints=())
    other = world.rank(Role.NORMAL)
    world.submit(other, again)
    world.load_hit(other, again, saver, "r")
    other.run()
    assert whole[:9] + other.tokens["r"] == whole


def test_the_toy_with_published_sizes(toy: Model) -> None:
    """Window 128, grain 128, keep 140: a long prompt in chunks, handed off, and a hit by a second request."""
    world = World(toy, keep=140, block_tokens=128, seed=3)
    source, target = world.rank(Role.PROMPT, saves=True, step_tokens_max=160), world.rank(Role.COMPLETION)
    first = world.request("first", 300, world.sampling(5), (100,), checkpoints=(128, 256))
    world.submit(source, first)
    source.run()
    world.hand_off(source, target, "first")
    target.run()
    world.check(first, source.tokens["first"] + target.tokens["first"])
    other = world.rank(Role.NORMAL, step_tokens_max=100)
    second = dataclasses.replace(first, request_id="second", hit_tokens=128, checkpoints=())
    world.submit(other, second)
    world.load_hit(other, second, source, "first")
    other.run()
    assert other.tokens["second"] == source.tokens["first"] + target.tokens["first"]


def test_stop_rules_are_the_plain_loops(world: World) -> None:
    """A token that appears is made a stop token: the engine ends there and reports it."""
    rank = world.rank(Role.NORMAL)
    free = world.request("free", 30, SamplingParams(seed=4, max_tokens=10, ignore_eos=True))
    world.submit(rank, free)
    rank.run()
    stop = rank.tokens["free"][4]
    at = rank.tokens["free"].index(stop)
    params = dataclasses.replace(free.sampling, stop_token_ids=(stop,))
    world.submit(rank, dataclasses.replace(free, request_id="stopped", sampling=params))
    rank.run()
    assert rank.tokens["stopped"] == rank.tokens["free"][: at + 1]
    assert rank.finished["stopped"].reason is FinishReason.STOP
