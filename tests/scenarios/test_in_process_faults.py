"""Whatever fails around them, requests end with the right tokens or a stated error, and nothing stays held."""

import asyncio
import random

import pytest
from scenarios.content_runner import build, expected
from scenarios.in_process import Fault, running, until
from shoal.cluster.live.clock import monotonic_s, now_us
from shoal.cluster.live.engine_parts import BROKEN_EXIT
from shoal.cluster.live.names import ENGINE_ROLES, INDEX, NODE, role_of
from shoal.cluster.live.transfer_in_process import Fault as WriteFault

REQUESTS = 24
STATED = ("UnavailableError", "DeadlineExceededError", "FullError", "EngineError")


async def crowd(world, service, count=REQUESTS, pictures=True, **fields):
    """Many different requests at once; all of them end, and those that are answered are answered rightly."""
    dice = random.Random(world.dice.random())
    jobs = [
        world.job(n % 9, dice.choice((20, 140, 300, 520)), dice.randint(1, 40), pictures and n % 6 == 0, **fields)
        for n in range(count)
    ]
    answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
    for job, answer in zip(jobs, answers, strict=True):
        right = expected(job.token_ids, job.sampling.max_tokens, ignore_eos=True)
        assert answer.error.startswith(STATED) or not answer.error, answer.error
        assert answer.token_ids == (right[: len(answer.token_ids)] if answer.error else right)
    return answers


def failed(answers):
    return [answer.error for answer in answers if answer.error]


@pytest.mark.parametrize("seed", range(2))
async def test_messages_between_engines_are_lost_repeated_and_late(tmp_path, seed):
    async with running(tmp_path, build, seed=seed, lease_s=1.0, attempts_max=8) as world:
        service = await world.entrypoint()
        faults = (Fault.LOSE, Fault.TWICE, Fault.LATE, Fault.NONE)
        world.call_fault = lambda group, method: world.dice.choice(faults) if method == "peer" else Fault.NONE
        assert failed(await crowd(world, service)) == []
        await world.quiet()


@pytest.mark.parametrize("seed", range(3))
async def test_any_call_fails_before_or_after_it_was_done(tmp_path, seed):
    """Every call of every part, polls and store included, one in twenty.

    Left out is what gives back by one call that nobody repeats: balancers' holds then end by time, and pins of the
    index with the life of their owner.
    """
    async with running(tmp_path, build, seed=seed, attempts_max=8) as world:
        service = await world.entrypoint()

        def fault(group, method):
            if method in ("release", "locate") or world.dice.random() > 0.05:
                return Fault.NONE
            return world.dice.choice((Fault.FAIL, Fault.FAIL_AFTER, Fault.TWICE, Fault.LATE))

        world.call_fault = fault
        for _ in range(2):
            assert len(failed(await crowd(world, service))) <= 2
        await world.quiet()


async def test_writes_land_late(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        world.write_fault = lambda *_: world.dice.choice((WriteFault.DELAY, WriteFault.NONE))
        answers = await crowd(world, service)
        assert failed(answers) == []
        assert not any(answer.count("re-routed") for answer in answers)
        await world.quiet()


async def test_a_failed_write_ends_the_life_of_its_writer_and_no_request(tmp_path):
    """A connection that broke to a peer that lives is never used again: the writer comes back in a new epoch."""
    async with running(tmp_path, build, seed=1, lost_after_s=0.2) as world:
        service = await world.entrypoint()
        world.loud.setLevel("CRITICAL")
        faults = iter((WriteFault.NONE,) * 9 + (WriteFault.FAIL,))
        world.write_fault = lambda *_: next(faults, WriteFault.NONE)
        answers = await crowd(world, service)
        assert failed(answers) == []
        assert sum(answer.count("re-routed") for answer in answers) >= 1
        await until(lambda: world.ended, "the writer ends")
        [(writer, code)] = world.ended
        await until(lambda: world.lives[writer.name].group.epoch > writer.epoch, "its next life")
        assert code == BROKEN_EXIT
        world.loud.lines.clear()
        await world.quiet()


async def test_a_write_that_never_ends_costs_its_request_and_memory_comes_back_with_the_peers_end(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        faults = iter((WriteFault.DROP,))
        world.write_fault = lambda *_: next(faults, WriteFault.NONE)
        began_s = monotonic_s()
        stuck = world.job(1, 140, 9, deadline_us=now_us() + 1_500_000)
        answer = await world.ask(service, stuck)
        assert answer.error.startswith("DeadlineExceededError")
        assert monotonic_s() - began_s < 8.0
        assert failed(await crowd(world, service, 8)) == []
        assert any("tickets" in word for word in world.held()), "blocks somebody may still write into were given away"
        for target in ("decode/0", "decode/1"):
            await world.renew(target)
        await world.quiet()


@pytest.mark.parametrize("seed", range(3))
async def test_engines_vanish_at_random(tmp_path, seed):
    async with running(tmp_path, build, seed=seed, attempts_max=8) as world:
        service = await world.entrypoint()
        asking = asyncio.create_task(crowd(world, service, 40))
        names = [name for name in world.lives if role_of(world.lives[name].group) in ENGINE_ROLES]
        for _ in range(6):
            await asyncio.sleep(world.dice.random() * 0.1)
            await world.renew(world.dice.choice(names), world.dice.random() * 0.1)
        answers = await asking
        assert failed(answers) == []
        await world.quiet()


@pytest.mark.parametrize("seed", range(2))
async def test_every_other_member_vanishes_too(tmp_path, seed):
    """Store nodes, the index, the encoder, balancers: each is missed for a while and comes back."""
    async with running(tmp_path, build, seed=seed, attempts_max=8) as world:
        service = await world.entrypoint()
        asking = asyncio.create_task(crowd(world, service, 40))
        names = [name for name in world.lives if role_of(world.lives[name].group) not in ENGINE_ROLES]
        world.dice.shuffle(names)
        for name in names:
            await asyncio.sleep(world.dice.random() * 0.05)
            await world.renew(name, world.dice.random() * 0.1)
        assert failed(await asking) == []
        assert failed(await crowd(world, service)) == []
        await world.quiet()


async def test_a_store_that_hangs_is_a_miss(tmp_path):
    """The index does not answer, then the nodes do not: requests are computed as if nothing were stored."""
    async with running(tmp_path, build, match_us=300_000) as world:
        service = await world.entrypoint()
        await crowd(world, service, 12, pictures=False)
        world.call_fault = lambda group, method: Fault.LOSE if role_of(group) == INDEX else Fault.NONE
        answers = await crowd(world, service, 12, pictures=False)
        assert failed(answers) == []
        assert not any(answer.cached_tokens for answer in answers)
        silent = ("read",)
        world.call_fault = lambda group, method: (
            Fault.LOSE if role_of(group) == NODE and method in silent else Fault.NONE
        )
        assert failed(await crowd(world, service, 12, pictures=False)) == []
        await world.quiet()
