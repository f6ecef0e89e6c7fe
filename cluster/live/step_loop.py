"""One thread runs an engine's steps; whatever else touches the engine runs there too, between two steps."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.cluster.live.clock import monotonic_s, now_us
from shoal.cluster.live.pace import Alone, Pace
from shoal.engines.run.engine import Engine
from shoal.engines.run.output import StepOutput

log = logging.getLogger(__name__)
T = TypeVar("T")

BROKEN_EXIT = 70
IDLE_S = 0.5  # how long an idle loop sleeps when nobody calls; a call wakes it at once


class StepLoop:
    """Steps while there is work, sleeps while there is none.

    `on_output` is called on the asyncio loop, in order, for each step that produced something. A step that raises has
    broken an invariant: memory can no longer be trusted, so the process ends and the cluster re-routes its requests.
    """

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[StepOutput], None],
        end: Callable[[int], object],
        pace: Pace | None = None,
    ) -> None:
        self._engine = engine
        self._pace = pace or Alone()
        self._on_output = on_output
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._step_began_s = 0.0  # 0 between steps
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    async def call(self, work: Callable[[Engine], T], then: Callable[[T], object] | None = None) -> T:
        """Run `work` on the engine between two steps and return its result; its exceptions come back here.

        `then` is called with the result on the asyncio loop, before the output of any later step: the caller itself
        goes on some turns of the loop afterwards, when such an output may have been told already.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work(self._engine)
            except Exception as error:  # handed to the caller, who knows what it means
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_succeed, future, result, then)

        self._calls.put(run)
        return await future

    def post(self, work: Callable[[Engine], Any]) -> None:
        """Run `work` on the engine between two steps; a failure there is a broken invariant."""
        self._calls.put(lambda: work(self._engine))

    def wake(self, vote: int) -> None:
        """Another rank of the group calls to a vote."""
        self._calls.put(lambda: self._pace.wake(vote))

    @property
    def step_s(self) -> float:
        """How long the step that runs now has run; 0 between steps."""
        began_s = self._step_began_s
        return monotonic_s() - began_s if began_s else 0.0

    def stop(self) -> None:
        """End the thread after the current step."""
        self._stopping = True
        self._calls.put(lambda: None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._serve_calls(block=not self._pace.is_awake(self._engine))
                if self._pace.is_awake(self._engine):
                    self._step()
        except BaseException:
            self._end_broken()

    def _step(self) -> None:
        self._step_began_s = monotonic_s()  # the wait for a vote counts: a group that never votes is broken, too
        is_step, kind = self._pace.verdict(self._engine, now_us())
        if is_step:
            self._step_began_s = monotonic_s()
            output = self._engine.step(now_us(), kind)
            self._engine.step_took(1e6 * self.step_s)
            if output:
                self._loop.call_soon_threadsafe(self._deliver, output)
        self._step_began_s = 0.0

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._on_output(output)
        except Exception:  # tokens, chunks and endings of every sequence in this step would be lost
            self._end_broken()

    def _end_broken(self) -> None:
        """An invariant is broken: the process ends, in the handler of the exception that shows it."""
        log.critical("step loop broke; this engine ends", exc_info=True)
        logging.shutdown()
        self._end(BROKEN_EXIT)

    def _serve_calls(self, block: bool) -> None:
        try:
            self._calls.get(block=block, timeout=IDLE_S)()
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return


def _succeed(future: asyncio.Future[T], result: T, then: Callable[[T], object] | None) -> None:
    if then is not None:
        then(result)
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
