"""Several answers to one request: the prompt is computed once, and whoever dies or leaves, the others go on."""

import asyncio
import random
import time
from functools import partial

import pytest
import torch
from scenarios.content_runner import build, expected
from scenarios.in_process import running, until
from scenarios.test_in_process_answers import Judge, build_with, model
from shoal.engines.config import Truncation
from shoal.engines.core.request import EngineRequest
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.plain import whole_text

__all__ = ["model"]


def ask_all(world, service, jobs):
    return [asyncio.create_task(world.ask(service, job)) for job in jobs]


def prefilled(answers):
    """Tokens that somebody computed of the prompts, over all answers."""
    marks = [mark for answer in answers for mark in answer.timeline.marks if mark.what == "chunk"]
    return sum(dict(mark.detail)["tokens"] for mark in marks)


async def test_three_answers_are_those_of_three_requests_and_the_prompt_is_computed_once(tmp_path, model):
    async with running(tmp_path, partial(build_with, model), seed=8) as world:
        service, judge = await world.entrypoint(), Judge(model, world)
        jobs = world.choices(3, 1, 160, 3, True, temperature=1.0, seed=5)
        answers = await asyncio.gather(*ask_all(world, service, jobs))
        for job, answer in zip(jobs, answers, strict=True):
            judge.check(job, answer)
        assert len({tuple(answer.token_ids) for answer in answers}) > 1
        assert prefilled(answers) == len(jobs[0].token_ids)
        assert [answer.count("forked") for answer in answers] == [0, 1, 1]
        assert [answer.count("encoded") for answer in answers] == [1, 0, 0]
        await world.quiet()


async def test_the_completion_engine_dies_in_mid_answer_and_every_choice_goes_on(tmp_path, model):
    async with running(tmp_path, partial(build_with, model), seed=9) as world:
        service, judge = await world.entrypoint(), Judge(model, world)
        jobs = world.choices(2, 2, 140, 12, temperature=1.0, seed=9)
        told = [0, 0]
        tasks = [
            asyncio.create_task(world.ask(service, job, lambda a, i=i: told.__setitem__(i, len(a.token_ids))))
            for i, job in enumerate(jobs)
        ]
        await until(lambda: min(told) >= 2, "each choice has tokens")
        await world.renew(next(n for n, x in world.lives.items() if n.startswith("decode/") and decodes(x)))
        answers = await asyncio.gather(*tasks)
        for job, answer in zip(jobs, answers, strict=True):
            judge.check(job, answer)
            assert answer.count("re-routed") == 1
        await world.quiet()


def decodes(life):
    return life.actor._parts is not None and life.actor._parts.steps._engine.capacity().running


@pytest.mark.parametrize("seed", range(3))
async def test_deaths_and_leavers_at_random(tmp_path, seed):
    """Engines die and clients of whole requests leave, at random; who stays gets all answers, and nothing is left."""
    dice = random.Random(seed)
    async with running(tmp_path, build, seed=seed) as world:
        service = await world.entrypoint()
        stayed = 0

        async def client(number):
            nonlocal stayed
            jobs = world.choices(dice.randint(2, 4), number % 4, dice.choice((3, 140, 400)), dice.randint(1, 30))
            tasks = ask_all(world, service, jobs)
            if dice.random() < 0.4:
                await asyncio.sleep(dice.random() * 0.4)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                return
            for job, answer in zip(jobs, await asyncio.gather(*tasks), strict=True):
                assert answer.error == ""
                assert answer.token_ids == expected(job.token_ids, job.sampling.max_tokens, ignore_eos=True)
            stayed += 1

        clients = [asyncio.create_task(client(number)) for number in range(24)]
        for name in ("decode/0", "prefill/1", "decode/1"):
            await asyncio.sleep(0.15)
            await world.renew(name)
        await asyncio.gather(*clients)
        assert stayed
        await world.quiet()


async def test_a_scored_prompt_and_its_choices(tmp_path, model):
    """Scores come from the PROMPT engine, once, and are the full forward's; nothing is taken from the store."""
    async with running(tmp_path, partial(build_with, model), seed=10) as world:
        service = await world.entrypoint()
        judge = Judge(model, world)
        judge._truncation = Truncation()
        warm = world.job(3, 280, 1)
        await world.ask(service, warm)
        await until(lambda: not world.held(), world.held)
        jobs = world.choices(2, 3, 280, 2, temperature=1.0, seed=2, prompt_logprobs=1)
        assert jobs[0].token_ids == warm.token_ids
        answers = await asyncio.gather(*ask_all(world, service, jobs))
        judge.check(jobs[1], answers[1])
        assert prefilled(answers) == len(jobs[0].token_ids)
        assert answers[1].prompt_scores == ()
        ids = jobs[0].token_ids
        text = whole_text(EngineRequest("plain", ids, len(ids), jobs[0].sampling), ids, {}, Truncation())
        table = torch.log_softmax(WholeSequence(model).logits_of(text, len(ids)).double(), -1)
        told = [score.logprob for score in answers[0].prompt_scores]
        assert told == pytest.approx([float(table[p - 1, ids[p]]) for p in range(1, len(ids))], abs=1e-6)
        await world.quiet()


async def test_a_deadline_ends_all_choices_and_frees_everything(tmp_path):
    async with running(tmp_path, build, seed=11) as world:
        service = await world.entrypoint()
        now_us = time.time_ns() // 1000
        jobs = world.choices(3, 1, 400, 3000, arrival_us=now_us, deadline_us=now_us + 500_000, is_urgent=True)
        answers = await asyncio.gather(*ask_all(world, service, jobs))
        assert {answer.error.partition(":")[0] for answer in answers} == {"DeadlineExceededError"}
        await world.quiet()
