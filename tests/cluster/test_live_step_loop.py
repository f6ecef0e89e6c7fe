"""The loop around an engine's steps: others can see from outside how long the running step has taken."""

import asyncio
import threading
from itertools import pairwise
from typing import cast

from shoal.cluster.live.step_loop import StepLoop
from shoal.engines.run.engine import Engine


class StuckEngine:
    """Its one step ends when it is told to."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_work = False

    def begin(self) -> None:
        """Have something to do."""
        self.has_work = True

    def step(self, now_us: int, verdict: None) -> None:
        """Wait, and say nothing."""
        assert self.may_end.wait(10)
        self.has_work = False

    def step_took(self, took_us: float) -> None:
        """Learn nothing."""


def test_a_step_that_does_not_end_is_seen_from_the_asyncio_loop() -> None:
    async def run() -> None:
        engine = StuckEngine()
        steps = StepLoop(cast(Engine, engine), lambda output: None, end=lambda code: None)
        steps.start()
        assert await steps.call(lambda _: 7) == 7
        assert steps.step_s == 0.0
        steps.post(lambda _: engine.begin())
        async with asyncio.timeout(5):
            while steps.step_s < 0.05:
                await asyncio.sleep(0.01)
        engine.may_end.set()
        async with asyncio.timeout(5):
            while steps.step_s:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(steps.stop)

    asyncio.run(run())


def test_what_follows_a_call_comes_before_the_output_of_a_later_step() -> None:
    """A hit's blocks, an admission: the caller goes on too late, when the next step may have been told already."""

    class BusyEngine:
        has_work = False

        def step(self, now_us: int, verdict: None) -> str:
            self.has_work = False
            return "output"

        def step_took(self, took_us: float) -> None:
            assert took_us >= 0

        def begin(self) -> str:
            self.has_work = True
            return "answer"

    async def run() -> list[str]:
        told: list[str] = []
        steps = StepLoop(cast(Engine, BusyEngine()), lambda output: told.append(str(output)), end=lambda code: None)
        steps.start()
        for _ in range(50):
            await steps.call(lambda engine: cast(BusyEngine, engine).begin(), told.append)
        async with asyncio.timeout(5.0):
            while told[-1] != "output":
                await asyncio.sleep(0.001)
        await asyncio.to_thread(steps.stop)
        return told

    told = asyncio.run(run())
    assert told[0] == "answer"
    assert told.count("answer") == 50
    assert ("output", "output") not in set(pairwise(told)), "an output was told before the answer that led to it"
