"""Kill -9 of any one actor under load: the answer is the undisturbed one, without a gap or a repeat."""

import asyncio
import os
import signal
from collections.abc import Callable

import httpx
import ray
from live.world import Answer, World


def answers_with_a_fault(
    world: World, seed: int, tokens: int, outputs: int, fault: Callable[[Answer, list[str]], bool]
) -> tuple[Answer, Answer]:
    """The same prompt twice: undisturbed, and with `fault(answer so far, route so far)` called until it is True."""

    async def run() -> tuple[Answer, Answer]:
        async with world.entrypoint() as service:
            calm = await world.ask(service, world.job(seed, tokens, outputs))
            job, done = world.job(seed, tokens, outputs), False
            stop = asyncio.Event()
            answer = Answer()

            def seen(now: Answer) -> None:
                answer.token_ids = now.token_ids

            async def disturb() -> None:
                nonlocal done
                while not done and not stop.is_set():
                    timeline = service.timeline(job.request_id)
                    route = list(timeline.route) if timeline else []
                    done = await asyncio.to_thread(fault, answer, route) if route else False
                    await asyncio.sleep(0.01)

            task = asyncio.create_task(disturb())
            result = await world.ask(service, job, seen)
            stop.set()
            await task
            assert done, "the fault never came"
            return calm, result

    return asyncio.run(run())


def test_a_completion_group_dies_mid_answer(world: World) -> None:
    killed: list[str] = []

    def fault(answer: Answer, route: list[str]) -> bool:
        if len(answer.token_ids) < 5:
            return False
        killed.append(next(name for name in route if name.startswith("decode/")))
        world.kill(killed[0])
        return True

    epochs = {m["name"]: m["epoch"] for m in world.members("decode")}
    calm, result = answers_with_a_fault(world, 101, 200, 40, fault)
    assert result.token_ids == calm.token_ids
    assert result.finish == "length"
    assert result.timeline is not None
    assert result.timeline.attempts >= 2
    world.wait_replaced(killed[0], epochs[killed[0]])


def test_a_prompt_group_dies_while_it_computes(world: World) -> None:
    killed: list[str] = []

    def fault(_: Answer, route: list[str]) -> bool:
        killed.append(route[0])
        world.kill(route[0])
        return True

    epochs = {m["name"]: m["epoch"] for m in world.members("prefill")}
    calm, result = answers_with_a_fault(world, 102, 900, 10, fault)
    assert result.token_ids == calm.token_ids
    world.wait_replaced(killed[0], epochs[killed[0]])


def test_a_store_node_dies(world: World) -> None:
    """Its stripes are not readable until it is back: requests compute instead, and nothing stored is lost."""
    epoch = world.member("node/1")["epoch"]

    async def run() -> tuple[Answer, Answer, Answer]:
        async with world.entrypoint() as service:
            cold = await world.ask(service, world.job(103, 500, 8))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(world.kill, "node/1")
            during = await world.ask(service, world.job(103, 500, 8))
            await asyncio.to_thread(world.wait_replaced, "node/1", epoch)
            return cold, during, await world.ask(service, world.job(103, 500, 8))

    cold, during, after = asyncio.run(run())
    assert cold.token_ids == during.token_ids == after.token_ids
    assert after.cached_tokens == 256, "the node came back with its directories"


def test_the_index_dies_and_is_rebuilt_from_the_devices(world: World) -> None:
    epoch = world.member("index/0")["epoch"]

    async def run() -> tuple[Answer, Answer]:
        async with world.entrypoint() as service:
            cold = await world.ask(service, world.job(104, 400, 8))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(world.kill, "index/0")
            await asyncio.to_thread(world.wait_replaced, "index/0", epoch)
            return cold, await world.ask(service, world.job(104, 400, 8))

    cold, after = asyncio.run(run())
    assert cold.token_ids == after.token_ids
    assert after.cached_tokens == 256


def test_both_balancers_die(world: World) -> None:
    epochs = {name: world.member(name)["epoch"] for name in ("prefill-balancer/0", "decode-balancer/0")}
    for name in epochs:
        world.kill(name)

    async def run() -> Answer:
        async with world.entrypoint() as service:
            return await world.ask(service, world.job(105, 150, 8))

    answer = asyncio.run(run())
    assert answer.finish == "length"
    assert answer.token_ids == world.plain(world.job(105, 150, 8), answer.token_ids)
    for name, epoch in epochs.items():
        world.wait_replaced(name, epoch)


def test_the_encoder_dies_while_a_picture_waits(world: World) -> None:
    epoch = world.member("encoder/0")["epoch"]
    world.kill("encoder/0")
    job = world.job(106, 150, 8, image=True)

    async def run() -> Answer:
        async with world.entrypoint() as service:
            return await world.ask(service, job)

    answer = asyncio.run(run())
    assert answer.token_ids == world.plain(job, answer.token_ids)
    world.wait_replaced("encoder/0", epoch)


def test_the_controller_dies_and_adopts_what_runs(world: World) -> None:
    """Requests go on without it; its next life keeps every member's epoch and still replaces the lost."""
    before = {m["name"]: m["epoch"] for m in world.overview()["members"]}

    def fault(answer: Answer, _: list[str]) -> bool:
        if len(answer.token_ids) < 3:
            return False
        os.kill(ray.get(world.controller().pid.remote(), timeout=10), signal.SIGKILL)
        return True

    calm, result = answers_with_a_fault(world, 107, 150, 20, fault)
    assert result.token_ids == calm.token_ids
    assert result.timeline is not None
    assert result.timeline.attempts == 1
    world.wait_healthy()
    assert {m["name"]: m["epoch"] for m in world.overview()["members"]} == before
    world.kill("decode/0")
    world.wait_replaced("decode/0", before["decode/0"])


def test_the_entrypoint_replica_dies_and_its_requests_are_let_go(world: World) -> None:
    """Its client's stream breaks, Serve starts another replica, and no engine goes on computing for nobody."""
    body = {"model": "shoal-toy", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 400}
    body |= {"stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{world.http}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert any("content" in line for line in lines)
        replica = next(p for p in world.replica_pids())
        os.kill(replica, signal.SIGKILL)
        broken = False
        try:
            for _ in lines:
                pass
        except httpx.HTTPError:
            broken = True
        assert broken, "the stream of a dead replica must not look complete"

    def answers() -> bool:
        try:
            return httpx.get(f"{world.http}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    world.wait("a new replica answers", answers)
    world.wait_empty()
