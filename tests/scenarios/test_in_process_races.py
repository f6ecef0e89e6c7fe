"""Races between a request's messages, each told in order, over the live shells in one process."""

import asyncio

from scenarios.content_runner import build, expected
from scenarios.in_process import running


def answer_of(job):
    return expected(job.token_ids, job.sampling.max_tokens, job.sampling.ignore_eos)


async def test_prompts_are_answered_and_nothing_is_left(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        jobs = [world.job(seed, tokens, 9) for seed, tokens in enumerate((1, 40, 130, 300, 700))]
        answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        for job, answer in zip(jobs, answers, strict=True):
            assert (answer.token_ids, answer.finish, answer.error) == (answer_of(job), "length", "")
        await world.quiet()
