"""Whatever way a request takes through the live cluster, its answer is the plain loop's, token for token."""

import asyncio
import shutil

from live.world import Answer, World


def test_prompts_images_and_hits_give_the_plain_loops_answer(world: World) -> None:
    """Six requests at once, then the same again from the store: long and short, with and without a picture."""
    jobs = [world.job(seed, tokens, 12, image) for seed, (tokens, image) in enumerate(CASES)]
    again = [world.job(seed, tokens, 12, image) for seed, (tokens, image) in enumerate(CASES)]

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with world.entrypoint() as service:
            cold = await asyncio.gather(*(world.ask(service, job) for job in jobs))
            await asyncio.sleep(1.0)  # saves are in the background; a hit below is asserted, so too short would fail
            return cold, await asyncio.gather(*(world.ask(service, job) for job in again))

    cold, warm = asyncio.run(run())
    for job, first, second in zip(jobs, cold, warm, strict=True):
        assert len(first.token_ids) == 12
        assert first.finish == "length"
        assert first.token_ids == world.plain(job, first.token_ids), f"{len(job.token_ids)} tokens, cold"
        assert second.token_ids == first.token_ids, f"{len(job.token_ids)} tokens, from the store"
        may_hit = len(job.token_ids) - 140 >= 128
        assert (second.cached_tokens > 0) == may_hit, f"{len(job.token_ids)} tokens: {second.cached_tokens} cached"
        assert first.cached_tokens == 0


CASES = [(40, False), (130, True), (300, False), (420, True), (700, True), (1100, False)]


def test_seeded_sampling_is_the_plain_loops_too(world: World) -> None:
    job = world.job(21, 200, 16, temperature=1.0, top_p=0.9, seed=1234)

    async def run() -> Answer:
        async with world.entrypoint() as service:
            return await world.ask(service, job)

    answer = asyncio.run(run())
    assert answer.token_ids == world.plain(job, answer.token_ids)


def test_two_devices_gone_change_nothing_and_three_are_a_miss(world: World) -> None:
    """Every stripe survives two lost directories; with a third the prompt is simply computed again."""
    jobs = [world.job(31, 500, 8) for _ in range(4)]
    devices = world.spec.store_config().devices

    async def run() -> list[Answer]:
        async with world.entrypoint() as service:
            answers = [await world.ask(service, jobs[0])]
            await asyncio.sleep(1.0)
            answers.append(await world.ask(service, jobs[1]))
            for device in devices[:2]:
                shutil.rmtree(device.path)
            answers.append(await world.ask(service, jobs[2]))
            shutil.rmtree(devices[5].path)
            answers.append(await world.ask(service, jobs[3]))
            return answers

    try:
        cold, warm, two_gone, three_gone = asyncio.run(run())
    finally:
        world.replace_disks("node/0", "node/1")

    assert cold.token_ids == world.plain(jobs[0], cold.token_ids)
    assert warm.token_ids == two_gone.token_ids == three_gone.token_ids == cold.token_ids
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == two_gone.cached_tokens == 256
    assert three_gone.cached_tokens == 0
    assert three_gone.finish == "length"
