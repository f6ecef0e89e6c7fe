"""With the toy model in every engine of one process, each answer is the plain loop's, whatever way it took."""

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from scenarios.in_process import running, until, without_drafts
from shoal.cluster.live.engine_build import Built, registered
from shoal.cluster.live.names import COMPLETION, role_of
from shoal.engines.core.request import EngineRequest
from shoal.engines.model.decoder import Model
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.load import build_engine, load_model
from shoal.engines.run.plain import replay
from shoal.engines.run.vision import VisionRunner
from shoal.engines.toy.build import ensure_toy


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load_model(ensure_toy())


def build_with(model, spec, group, transfer_of):
    """An engine over the one model of this process; memory starts dirty."""
    engine, memory = build_engine(model, without_drafts(spec.engine(role_of(group))), saves_grains=True)
    memory.slots.fill_(0xA5)
    return Built(engine, memory, registered(transfer_of, group, memory), {"all": "torch"})


class Judge:
    """The plain loop over the same model."""

    def __init__(self, model, world):
        self._whole = WholeSequence(model)
        self._vision = VisionRunner.load(Path(world.spec.model_dir))
        self._truncation = world.spec.cluster.groups[0].engine.truncation

    def check(self, job, answer):
        assert answer.error == ""
        assert len(answer.token_ids) == job.sampling.max_tokens
        rows = {s.digest: self._vision.encode(c) for s, c in zip(job.spans, job.canvases, strict=True)}
        request = EngineRequest("plain", job.token_ids, len(job.token_ids), job.sampling, job.spans)
        drawn = replay(self._whole, request, answer.token_ids, rows, self._truncation)
        assert answer.token_ids == [d.token_id for d in drawn], f"{len(job.token_ids)} tokens"


def saved(world):
    return all((engine._parts._saver.is_idle) for engine in world.engines())


async def test_random_prompts_pictures_and_hits(tmp_path, model):
    """Cold, then again from the store with other companions, then continued by their own answers."""
    dice = random.Random(5)
    async with running(tmp_path, partial(build_with, model), seed=5) as world:
        service, judge = await world.entrypoint(), Judge(model, world)
        cases = [(n, dice.choice((30, 150, 290, 420, 600)), n % 2 == 0) for n in range(5)]
        sampled = {1: {"temperature": 1.0, "top_p": 0.9, "seed": 77}, 4: {"temperature": 0.7, "top_k": 20, "seed": 3}}
        jobs = [world.job(n, tokens, 5, image, **sampled.get(n, {})) for n, tokens, image in cases]
        cold = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        await until(lambda: saved(world) and not world.held(), world.held)
        again = [world.job(n, tokens, 5, image, **sampled.get(n, {})) for n, tokens, image in reversed(cases)]
        warm = await asyncio.gather(*(world.ask(service, job) for job in again))
        for job, answer in [*zip(jobs, cold, strict=True), *zip(again, warm, strict=True)]:
            judge.check(job, answer)
        for job, answer in zip(again, warm, strict=True):
            assert (answer.cached_tokens > 0) == (len(job.token_ids) - 134 >= 128), len(job.token_ids)
        routes = {answer.timeline.route for answer in (*cold, *warm)}
        assert len({prefill for prefill, _ in routes}) == len({decode for _, decode in routes}) == 2, routes
        await world.quiet()


async def test_engines_vanish_and_the_answers_are_the_same(tmp_path, model):
    """A COMPLETION group dies in mid-answer and a PROMPT group in mid-prompt, with a picture and a hit on the way."""
    async with running(tmp_path, partial(build_with, model), seed=6) as world:
        service, judge = await world.entrypoint(), Judge(model, world)
        first = world.job(1, 300, 4, image=True)
        judge.check(first, await world.ask(service, first))
        await until(lambda: saved(world) and not world.held(), world.held)
        jobs = [world.job(1, 300, 30, image=True), world.job(2, 500, 30), world.job(3, 200, 20, image=True)]
        tasks = [asyncio.create_task(world.ask(service, job)) for job in jobs]
        await until(lambda: running_at_target(world) >= 2, "two decode")
        await world.renew("decode/0")
        await world.renew("prefill/1")
        answers = await asyncio.gather(*tasks)
        for job, answer in zip(jobs, answers, strict=True):
            judge.check(job, answer)
        assert sum(answer.count("re-routed") for answer in answers) >= 1
        await world.quiet()


def running_at_target(world):
    targets = (e for e in world.engines() if role_of(e._group) == COMPLETION)
    return sum(len(e._parts.steps._engine._scheduler.ledger.running) for e in targets)
