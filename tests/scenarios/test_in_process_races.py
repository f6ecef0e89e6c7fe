"""Races between one request's messages, each told in order, over the live shells in one process."""

import asyncio

from scenarios.content_runner import EOS, build, expected
from scenarios.in_process import Fault, running, until
from shoal.balancers.reports import GroupRef
from shoal.cluster.core.messages import Known
from shoal.cluster.core.state import State
from shoal.cluster.live.names import COMPLETION, DECODE_BALANCER, PREFILL_BALANCER, PROMPT, role_of
from shoal.cluster.live.outbox import Outbox
from shoal.cluster.live.submission import Origin


def answer_of(job):
    return expected(job.token_ids, job.sampling.max_tokens, job.sampling.ignore_eos)


def is_right(job, answer):
    assert answer.error == ""
    assert answer.token_ids == answer_of(job), "tokens are not those of an undisturbed request"
    return True


def leave_at(world, service, job, state):
    """A client that leaves as soon as its request is in a state."""

    async def client():
        task = asyncio.create_task(world.ask(service, job))
        await until(lambda: job.request_id in service._runs, "begun")
        async with asyncio.timeout(30.0):  # looked at in every turn of the loop: some states last but a few
            while not task.done() and machine_of(service, job).state is not state:
                await asyncio.sleep(0)
        assert not task.done(), f"the request never was {state}"
        task.cancel()
        await asyncio.wait((task,))

    return client()


def machine_of(service, job):
    return service._runs[job.request_id]._machine


def lose_peer_messages_to(role):
    return lambda group, method: Fault.LOSE if method == "peer" and role_of(group) == role else Fault.NONE


def running_at(world, role):
    return sum(len(e._parts.steps._engine._scheduler.ledger.running) for e in world.engines() if role_at(e) == role)


def role_at(engine):
    return role_of(engine._group)


async def test_prompts_are_answered_and_nothing_is_left(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        jobs = [world.job(seed, tokens, 9) for seed, tokens in enumerate((1, 40, 130, 300, 700))]
        answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        assert all(map(is_right, jobs, answers))
        assert {answer.finish for answer in answers} == {"length"}
        await world.quiet()


async def test_an_answer_of_one_token_lets_its_ticket_go(tmp_path):
    """It ends where its prompt was computed: by length, and by the end token."""
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        jobs = [world.job(seed, 150, 1) for seed in range(3)]
        candidates = (world.job(seed, 20, 9, ignore_eos=False) for seed in range(100, 1000))
        jobs.append(next(job for job in candidates if answer_of(job) == [EOS]))
        answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        assert all(map(is_right, jobs, answers))
        assert [answer.finish for answer in answers] == ["length"] * 3 + ["stop"]
        assert not any(answer.count("re-routed") for answer in answers)
        await world.quiet()


async def test_calls_that_arrive_twice_are_done_once(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        world.call_fault = lambda group, method: Fault.TWICE if method in DOUBLED else Fault.NONE
        jobs = [world.job(seed, 140, outputs, seed % 2 == 0) for seed, outputs in enumerate((1, 2, 9, 9, 30))]
        answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        assert all(map(is_right, jobs, answers))
        assert not any(answer.count("re-routed") for answer in answers)
        await world.quiet()


DOUBLED = ("reserve", "submit", "abort", "peer", "release", "encode", "report", "insert")


async def test_an_abort_overtakes_reserve_and_submit(tmp_path):
    """The engine hears of the end before it hears of the beginning."""
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        late = ("reserve", "submit")
        world.call_fault = lambda group, method: Fault.LATE if method in late else Fault.NONE
        for seed in range(12):
            state = State.RESERVING if seed % 2 else State.PREFILLING
            await leave_at(world, service, world.job(seed, 140, 30), state)
        await world.quiet()


async def test_a_reservation_whose_answer_was_lost_is_given_back(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        failures = iter((Fault.FAIL_AFTER, Fault.FAIL))
        world.call_fault = lambda group, method: next(failures, Fault.NONE) if method == "reserve" else Fault.NONE
        job = world.job(1, 140, 12)
        answer = await world.ask(service, job)
        assert is_right(job, answer)
        assert answer.count("re-routed") == 2
        await world.quiet()


async def test_an_admitted_sequence_ends_with_its_client_while_the_source_has_not_let_go(tmp_path):
    async with running(tmp_path, build, lease_s=1.5) as world:
        service = await world.entrypoint()
        world.call_fault = lose_peer_messages_to(PROMPT)
        task = asyncio.create_task(world.ask(service, world.job(1, 140, 3500)))
        await until(lambda: running_at(world, COMPLETION), "decoding")
        task.cancel()
        await until(lambda: not running_at(world, COMPLETION), "nothing decodes for nobody", 3.0)
        await world.quiet()


async def test_the_source_dies_after_admission_and_before_release(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        world.call_fault = lose_peer_messages_to(PROMPT)
        job = world.job(1, 140, 300)
        task = asyncio.create_task(world.ask(service, job))
        await asyncio.sleep(0)  # the task begins, and with it the machine
        await until(lambda: machine_of(service, job).state is State.DECODING, "the entrypoint knows of the admission")
        world.kill(machine_of(service, job)._attempt.prefill.group.name)
        answer = await task
        assert is_right(job, answer)
        assert answer.count("re-routed") == 0
        await world.quiet()


async def test_a_lease_that_runs_out_after_admission_does_not_touch_the_answer(tmp_path):
    async with running(tmp_path, build, lease_s=0.4) as world:
        service = await world.entrypoint()
        world.call_fault = lambda group, method: Fault.LOSE if method == "peer" and decoding() else Fault.NONE
        decoding = lambda: running_at(world, COMPLETION)  # noqa: E731
        job = world.job(1, 140, 600)
        answer = await world.ask(service, job)
        assert is_right(job, answer)
        assert answer.count("re-routed") == 0
        await world.quiet()


async def test_a_lost_group_is_left_with_the_tokens_kept(tmp_path):
    """The COMPLETION group dies in mid-answer, then the PROMPT group of the second attempt in mid-prompt."""
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        job = world.job(3, 500, 200)
        killed = []

        def on_tokens(answer):
            if len(answer.token_ids) > 20 and not killed:
                killed.append(machine_of(service, job)._attempt.decode.group.name)
                world.kill(killed[0])
                world.spawn(kill_source())

        async def kill_source():
            attempt = machine_of(service, job).attempt
            await until(lambda: machine_of(service, job).state is State.PREFILLING, "second prompt")
            assert machine_of(service, job).attempt >= attempt
            killed.append(machine_of(service, job)._attempt.prefill.group.name)
            world.kill(killed[1])

        answer = await world.ask(service, job, on_tokens)
        assert is_right(job, answer)
        assert answer.count("re-routed") in (1, 2)  # the second source may have handed off just before it died
        for name in killed:
            await world.begin(name)
        again = await world.ask(service, world.job(4, 200, 20))
        assert again.error == ""
        await world.quiet()


async def test_an_entrypoint_that_goes_silent_takes_its_requests_with_it(tmp_path):
    async with running(tmp_path, build, silent_s=0.6) as world:
        silent, other = await world.entrypoint(), await world.entrypoint()
        gone = [asyncio.create_task(world.ask(silent, world.job(seed, 140, 3500))) for seed in range(3)]
        stays = world.job(9, 140, 400)
        answer = asyncio.create_task(world.ask(other, stays))
        await until(lambda: running_at(world, COMPLETION) == 4, "all decode")
        silent.tasks.cancel()
        await until(lambda: running_at(world, COMPLETION) <= 1, "nothing decodes for nobody", 6.0)
        assert is_right(stays, await answer)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await world.quiet()


async def test_an_entrypoint_that_was_thought_silent_hears_everything_new():
    outbox = Outbox()
    outbox.post("e", ("first", Known(1, GroupRef("decode/0", 1))))
    number, letters = await outbox.poll("e", 0, 0.0)
    assert [name for name, _ in letters] == ["first"]
    assert outbox.silent(0.0) == ["e"]
    outbox.post("e", ("second", Known(1, GroupRef("decode/0", 1))))
    number, letters = await outbox.poll("e", number, 0.0)
    assert [name for name, _ in letters] == ["second"]
    outbox.post("e", ("third", Known(1, GroupRef("decode/0", 1))))
    number, letters = await outbox.poll("e", number, 0.0)
    assert [name for name, _ in letters] == ["third"]


async def test_a_quiet_poll_brings_a_word_about_each_sequence(tmp_path):
    """A sequence that only waits must not look lost to its entrypoint."""
    async with running(tmp_path, build) as world:
        actor = world.actor("decode/0")
        origin = Origin("e", "waiting", 1, "default", "")
        source = GroupRef("prefill/0", 1)
        await actor.reserve(origin, "waiting/1", source, 100, 1 << 62)
        _, letters = await actor.poll("e", 0, 0.01)
        assert letters == [("waiting", Known(1, GroupRef("decode/0", 1)))]
        await actor.abort("waiting/1", "test")
        await world.quiet()


async def test_a_poll_that_fails_once_is_not_the_last(tmp_path):
    async with running(tmp_path, build, progress_us=30_000_000) as world:
        service = await world.entrypoint()
        failed: set[GroupRef] = set()

        def once(group, method):
            if method != "poll" or group in failed:
                return Fault.NONE
            failed.add(group)
            return Fault.FAIL

        world.call_fault = once
        await until(lambda: len(failed) == 4, "each engine's poll has failed once")
        job = world.job(1, 140, 20)
        async with asyncio.timeout(10.0):
            assert is_right(job, await world.ask(service, job))
        await world.quiet()


async def test_a_draining_group_is_not_the_clients_mistake(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        await world.actor("prefill/0").drain()
        jobs = [world.job(seed, 140, 12) for seed in range(6)]
        answers = await asyncio.gather(*(world.ask(service, job) for job in jobs))
        assert all(map(is_right, jobs, answers))
        await world.quiet()


async def test_balancers_may_vanish_and_come_back(tmp_path):
    async with running(tmp_path, build) as world:
        service = await world.entrypoint()
        jobs = [world.job(seed, 140, 60) for seed in range(8)]
        tasks = [asyncio.create_task(world.ask(service, job)) for job in jobs]
        for role in (PREFILL_BALANCER, DECODE_BALANCER):
            await until(lambda: running_at(world, COMPLETION), "some decode")
            world.kill(f"{role}/0")
            await world.begin(f"{role}/0")
        answers = await asyncio.gather(*tasks)
        assert all(map(is_right, jobs, answers))
        await world.quiet()
