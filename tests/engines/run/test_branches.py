"""Several answers to one prompt: computed once, and each answer is that of a request of its own with its seed."""

from dataclasses import replace

import pytest
from engine_world import Rank, World
from shoal.engines.config import CacheConfig, Role
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.core.request import Branch, EngineRequest, SamplingParams
from shoal.engines.model.decoder import Model
from test_constrained import compiler

SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, seed=40, max_tokens=9, ignore_eos=True)
NAMES = ("p", "b1", "b2", "b3")


@pytest.fixture
def world(narrow_drafting: Model) -> World:
    return World(narrow_drafting, keep=24, block_tokens=16, seed=3)


def branching(world: World, length: int, sampling: SamplingParams = SAMPLED, **fields: object) -> EngineRequest:
    request = world.request("p", length, sampling, **fields)
    return replace(request, branches=tuple(Branch(f"b{i}", sampling.seed + i) for i in (1, 2, 3)))


def check_all(world: World, request: EngineRequest, tokens: dict[str, list[int]]) -> None:
    """Each answer is the plain loop's for a request of its own."""
    for number, name in enumerate(NAMES):
        alone = replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + number))
        world.check(alone, tokens[name])
        assert len(tokens[name]) == request.sampling.max_tokens
    assert len({tuple(t) for t in tokens.values()}) > 1, "all seeds gave the same answer"


def is_empty(rank: Rank) -> bool:
    capacity = rank.engine.capacity()
    return (capacity.blocks_free, capacity.slots_free) == (capacity.blocks_count, capacity.slots_count)


@pytest.mark.parametrize("length", [48, 43, 49])  # a full last block, a partial one, one token in the last
def test_a_normal_engine_computes_the_prompt_once(world: World, length: int) -> None:
    rank = world.rank(Role.NORMAL, step_tokens_max=16)
    request = branching(world, length, images=(5,))
    world.submit(rank, request)
    rank.run()
    check_all(world, request, rank.tokens)
    assert sum(o.rows for o in rank.outputs) == length + 4 * (SAMPLED.max_tokens - 1)
    assert is_empty(rank)


@pytest.mark.parametrize("drafts", [0, 3])
def test_branches_begin_where_the_prompt_is_handed_off_to(world: World, drafts: int) -> None:
    """Greedy with drafts: what drafts do to a sampled answer depends on where it began, with or without branches."""
    source, target = world.rank(Role.PROMPT, drafts=drafts), world.rank(Role.COMPLETION, drafts=drafts)
    sampling = replace(SAMPLED, temperature=0.0 if drafts else 1.2, repetition_penalty=1.2)
    request = branching(world, 43, sampling)
    world.submit(source, request)
    source.run()
    world.hand_off(source, target, "p")
    target.engine.check()
    shared = [s.block_table[:2] for s in target.engine._scheduler.ledger.arrived]
    assert len(shared) == 4
    assert len({tuple(table) for table in shared}) == 1, "the prompt's whole blocks are shared"
    target.run()
    tokens = target.tokens | {"p": source.tokens["p"] + target.tokens["p"]}
    for number, name in enumerate(NAMES):
        world.check(replace(request, sampling=replace(sampling, seed=40 + number)), tokens[name])
    assert source.tokens.keys() == {"p"}
    assert is_empty(source)
    assert is_empty(target)


def test_answers_of_one_token_end_where_the_prompt_is_computed(world: World) -> None:
    source = world.rank(Role.PROMPT)
    request = branching(world, 30, replace(SAMPLED, max_tokens=1, logprobs=2))
    world.submit(source, request)
    source.run()
    check_all(world, request, source.tokens)
    assert source.finished.keys() == set(NAMES)
    assert [b.refusal for o in source.outputs for b in o.branched] == [""] * 3
    assert is_empty(source)


@pytest.mark.parametrize("role", [Role.PROMPT, Role.NORMAL])
def test_the_first_answer_ends_with_its_first_token(world: World, role: Role) -> None:
    """Where the prompt is decoded the others adopt what it leaves; a PROMPT engine has nowhere to send them."""
    probe = world.rank(Role.NORMAL)
    request = branching(world, 43)
    world.submit(probe, request)
    probe.run()
    firsts = [probe.tokens[name][0] for name in NAMES]
    request = replace(request, sampling=replace(SAMPLED, stop_token_ids=(firsts[0],)))
    rank = world.rank(role)
    world.submit(rank, request)
    rank.run()
    ended = {name for name, first in zip(NAMES, firsts, strict=True) if first == firsts[0]}
    assert ended != set(NAMES), "all answers begin alike: the scenario does not test what it says"
    refused = {b.request_id for o in rank.outputs for b in o.branched if b.refusal}
    if role is Role.PROMPT:
        assert (set(rank.finished), refused) == (ended, set(NAMES) - ended)
    else:
        assert (set(rank.finished), refused) == (set(NAMES), set())
        for name in set(NAMES) - ended:
            free = probe.tokens[name]
            cut = free.index(firsts[0]) + 1 if firsts[0] in free else len(free)
            assert rank.tokens[name] == free[:cut]
    assert is_empty(rank)


def test_a_branch_without_room_says_so_and_takes_nothing(world: World) -> None:
    cache = CacheConfig(block_tokens=16, blocks_count=64, slots_count=3)  # one is nobody's, one the prompt's
    source, target = world.rank(Role.PROMPT), world.rank(Role.COMPLETION, cache=cache)
    request = branching(world, 43)
    world.submit(source, request)
    source.run()
    world.hand_off(source, target, "p")
    target.step()
    refusals = [(b.request_id, bool(b.refusal)) for b in target.outputs[0].branched]
    assert refusals == [("b1", False), ("b2", True), ("b3", True)]
    target.run()
    assert target.finished.keys() == {"p", "b1"}
    assert is_empty(target)


def test_an_aborted_prompt_has_no_branches_and_an_aborted_branch_leaves_the_others(world: World) -> None:
    rank = world.rank(Role.NORMAL, step_tokens_max=16)
    world.submit(rank, branching(world, 40))
    rank.step()
    rank.engine.abort("p")
    rank.run()
    assert rank.finished.keys() == {"p"}
    assert is_empty(rank)
    request = replace(branching(world, 40), request_id="q")
    world.submit(rank, request)
    while "b2" not in rank.tokens:
        rank.step()
    rank.engine.abort("b2")
    rank.engine.abort("q")
    rank.run()
    for number in (1, 3):
        alone = replace(request, sampling=replace(SAMPLED, seed=SAMPLED.seed + number))
        world.check(alone, rank.tokens[f"b{number}"])
    assert is_empty(rank)


def test_a_branch_that_is_preempted_is_computed_again(world: World) -> None:
    """There is not room for four answers to grow: some are preempted and come again, by themselves."""
    rank = world.rank(Role.NORMAL, cache=CacheConfig(block_tokens=16, blocks_count=9, slots_count=12))
    request = branching(world, 40, replace(SAMPLED, max_tokens=20))
    world.submit(rank, request)
    rank.run()
    assert sum(o.rows for o in rank.outputs) > 40 + 4 * 19, "nobody was preempted"
    check_all(world, request, rank.tokens)
    assert is_empty(rank)


def test_each_branch_follows_the_grammar_by_itself(world: World) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "(yes|no|perhaps){1,9}")
    request = replace(branching(world, 30, replace(SAMPLED, ignore_eos=False, max_tokens=12)), grammar=spec)
    source, target = world.rank(Role.PROMPT), world.rank(Role.COMPLETION)
    world.submit(source, request)
    source.engine.grammar_ready("p", compiler().compile(spec))
    source.run()
    world.hand_off(source, target, "p", compiler().compile(spec))
    target.run()
    assert target.finished.keys() == set(NAMES)
    answers = target.tokens | {"p": source.tokens["p"] + target.tokens["p"]}
    for name, tokens in answers.items():
        grammar = compiler().compile(spec)
        assert all(grammar.accept(token) for token in tokens), name
    assert len({tuple(tokens) for tokens in answers.values()}) > 1
    assert is_empty(target)
