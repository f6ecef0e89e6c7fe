"""Scores of prompt tokens are those of one full forward, whatever the chunks, the batch, the truncation of others."""

from dataclasses import replace

import pytest
import torch
from engine_world import Rank, World
from shoal.engines.config import CacheConfig, Role, Truncation, TruncationMode
from shoal.engines.core.request import Branch, EngineRequest, PromptScore, Rejected, SamplingParams
from shoal.engines.model.decoder import Model
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.plain import whole_text
from shoal.engines.run.prompt_scores import ROWS_MAX, score

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
NEAR = 1e-6


@pytest.fixture
def world(narrow: Model) -> World:
    return World(narrow, keep=24, block_tokens=16, seed=12)


def scores_of(rank: Rank, name: str) -> dict[int, PromptScore]:
    """By position; chunks may come again, and must say the same."""
    found: dict[int, PromptScore] = {}
    for output in rank.outputs:
        for part in output.prompt_scores:
            if part.request_id == name:
                for position, one in enumerate(part.scores, part.first):
                    assert found.setdefault(position, one) == one
    return found


def check(world: World, request: EngineRequest, found: dict[int, PromptScore]) -> None:
    """Every prompt token but the first, against the forward that computes all layers of the whole prompt."""
    assert sorted(found) == list(range(1, request.prompt_len))
    text = whole_text(request, request.token_ids[: request.prompt_len], world.images, Truncation())
    table = torch.log_softmax(WholeSequence(world.model).logits_of(text, request.prompt_len).double(), -1)
    for position, one in found.items():
        row, token = table[position - 1], request.token_ids[position]
        assert one.logprob == pytest.approx(float(row[token]), abs=NEAR)
        assert len(one.top) == request.prompt_logprobs
        assert all(value == pytest.approx(float(row[other]), abs=NEAR) for other, value in one.top)
        assert [v for _, v in one.top] == sorted((v for _, v in one.top), reverse=True)
        assert one.rank - 1 <= int((row > row[token] - 2 * NEAR).sum())
        assert one.rank - 1 >= int((row > row[token] + 2 * NEAR).sum())


@pytest.mark.parametrize(
    ("mode", "role", "rows"),
    [
        (TruncationMode.COMPACT, Role.NORMAL, 21),
        (TruncationMode.COMPACT, Role.PROMPT, 512),
        (TruncationMode.MASK, Role.PROMPT, 21),
    ],
)
def test_any_chunks_and_companions(world: World, mode: TruncationMode, role: Role, rows: int) -> None:
    world.truncation = Truncation(mode, 24)
    rank = world.rank(role, step_tokens_max=rows)
    scored = [replace(world.request(f"s{n}", n, GREEDY, (7,)), prompt_logprobs=n % 4) for n in (15, 61, 90)]
    others = [world.request(f"o{n}", n, GREEDY) for n in (70, 33)]
    for request in (scored[0], others[0], scored[1], others[1], scored[2]):
        world.submit(rank, request)
    rank.run()
    for request in scored:
        check(world, request, scores_of(rank, request.request_id))
    for request in others:
        world.check(request, rank.tokens[request.request_id])
        assert not scores_of(rank, request.request_id)
    world.truncation = Truncation()  # a scored request truncates nothing, so its answer is that of no truncation
    for request in scored:
        world.check(request, rank.tokens[request.request_id])


def test_a_preempted_prompt_says_the_same_again(world: World) -> None:
    rank = world.rank(Role.NORMAL, cache=CacheConfig(block_tokens=16, blocks_count=8, slots_count=12))
    sampling = replace(GREEDY, max_tokens=30)
    requests = [replace(world.request(f"r{i}", 40, sampling), prompt_logprobs=1) for i in range(2)]
    for request in requests:
        world.submit(rank, request)
    rank.run()
    assert sum(len(o.prompt_scores) for o in rank.outputs) > 2, "nothing was preempted"
    for request in requests:
        check(world, request, scores_of(rank, request.request_id))


def test_branches_of_a_scored_prompt_are_computed_alike(world: World) -> None:
    rank = world.rank(Role.NORMAL)
    sampling = replace(GREEDY, temperature=1.0, seed=4)
    request = replace(world.request("p", 50, sampling), prompt_logprobs=0, branches=(Branch("b", 5),))
    world.submit(rank, request)
    rank.run()
    world.truncation = Truncation()
    world.check(request, rank.tokens["p"])
    world.check(replace(request, sampling=replace(sampling, seed=5)), rank.tokens["b"])
    assert not scores_of(rank, "b")


def test_a_hit_has_no_logits(world: World) -> None:
    rank = world.rank(Role.NORMAL)
    request = replace(world.request("r", 80, GREEDY, hit_tokens=16), prompt_logprobs=1)
    answer = rank.engine.submit(request, 0)
    assert isinstance(answer, Rejected)
    assert "prompt_logprobs" in answer.reason


def test_ties_count_for_nobody_and_few_rows_are_held_at_once(world: World) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [float("nan")] * 4])
    first, broken = score(logits, [2, 0], 3)
    assert (first.rank, [i for i, _ in first.top]) == (1, [1, 2, 0])
    assert (broken.rank, broken.logprob) == (1, -9999.0)
    rank = world.rank(Role.PROMPT, step_tokens_max=1024)
    seen: list[int] = []
    model = rank.engine._runner._model
    logits_of = model.logits
    model.logits = lambda hidden: seen.append(len(hidden)) or logits_of(hidden)
    request = replace(world.request("r", 300, replace(GREEDY, max_tokens=1)), prompt_logprobs=0)
    world.submit(rank, request)
    rank.run()
    assert seen == [1, ROWS_MAX, ROWS_MAX, 299 - 2 * ROWS_MAX]
