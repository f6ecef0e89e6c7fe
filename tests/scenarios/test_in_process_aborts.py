"""Clients that leave at random points of their requests' lives leave nothing behind anywhere."""

import asyncio
import random

from scenarios.content_runner import build, expected
from scenarios.in_process import running

REQUESTS = 400
AT_ONCE = 60
STAY_S = 1.2  # about how long a request takes when so many run at once
PROMPTS = 8


async def test_an_abort_storm_leaves_nothing(tmp_path):
    """Some clients leave by their clock, some after a number of tokens, some stay; those who stay get it right."""
    dice = random.Random(4)
    gate = asyncio.Semaphore(AT_ONCE)
    stages: dict[str, int] = {}
    stayed = 0
    async with running(tmp_path, build, seed=4) as world:
        service = await world.entrypoint()

        async def client(number: int) -> None:
            nonlocal stayed
            job = world.job(number % PROMPTS, dice.choice((3, 60, 140, 400)), dice.randint(1, 30), number % 5 == 0)
            leaves_s = dice.choice((None, 0.0, dice.random() * 0.1, dice.random() * STAY_S))
            leaves_tokens = dice.choice((999, dice.randint(1, 20)))
            async with gate:
                task = asyncio.create_task(
                    world.ask(
                        service, job, lambda a: len(a.token_ids) >= leaves_tokens and leave_now(service, job, task)
                    )
                )
                if leaves_s is not None:
                    world.loop.call_later(leaves_s, leave_now, service, job, task)
                await asyncio.wait((task,))
            if task.cancelled():
                return
            answer = task.result()
            stayed += 1
            assert answer.error == ""
            assert answer.token_ids == expected(job.token_ids, job.sampling.max_tokens, ignore_eos=True)

        def leave_now(service, job, task) -> None:
            run = service._runs.get(job.request_id)
            if run is not None and not task.done():
                stage = str(run._machine.state)
                stages[stage] = stages.get(stage, 0) + 1
            task.cancel()

        await asyncio.gather(*(client(number) for number in range(REQUESTS)))
        await world.quiet()
    assert stayed > REQUESTS // 10
    left_in = {"matching", "encoding", "routing", "reserving", "prefilling", "handing off", "decoding"}
    assert left_in <= stages.keys(), f"the storm did not reach {left_in - stages.keys()}: {stages}"
