"""The loop around an engine's steps: others can see from outside how long the running step has taken."""

import asyncio
import threading
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

    def step(self, now_us: int) -> None:
        """Wait, and say nothing."""
        assert self.may_end.wait(10)
        self.has_work = False


def test_a_step_that_does_not_end_is_seen_from_the_asyncio_loop() -> None:
    async def run() -> None:
        engine = StuckEngine()
        steps = StepLoop(cast(Engine, engine), lambda output: None)
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
