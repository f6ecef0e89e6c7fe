"""Runs one request's sequences against the service: gathers their batches, honours the deadline, aborts on exit."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from shoal.cluster.api.answer import Answer, Delta
from shoal.cluster.api.errors import ApiError, DeadlineExceededError, EngineError
from shoal.cluster.api.jobs import ChatJob, ChatService, TokenBatch
from shoal.cluster.api.metrics import ApiMetrics

log = logging.getLogger(__name__)
QUEUE_BATCHES = 64
CLOSE_S = 5.0  # how long an iterator may take to close
Update = tuple[int, Delta]


class Run:
    """The live side of one request. Use as an async context: leaving it closes every iterator still open.

    One task a sequence moves batches into a bounded queue, so a slow client slows the sequences' iterators, not
    the others'. `updates()` yields what clients may see; an error of any sequence ends the request.
    """

    def __init__(
        self,
        service: ChatService,
        jobs: Sequence[ChatJob],
        answers: Sequence[Answer],
        metrics: ApiMetrics,
        wait_s: float,
    ) -> None:
        self.wait_s = wait_s
        self._service = service
        self._jobs = jobs
        self.answers = answers
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[int, TokenBatch | ApiError]] = asyncio.Queue(QUEUE_BATCHES)
        self._pumps: list[asyncio.Task[None]] = []
        self._last_s: float | None = None  # when the last batch with tokens came

    async def __aenter__(self) -> "Run":
        self._metrics.waiting.inc()
        self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._jobs))]
        return self

    async def __aexit__(self, *reason: object) -> None:
        for pump in self._pumps:
            pump.cancel()
        _ended, stuck = await asyncio.wait(self._pumps, timeout=CLOSE_S)
        if stuck:
            log.error("request %s: an aborted sequence did not close in %g s", self._jobs[0].request_id, CLOSE_S)
        (self._metrics.waiting if self._last_s is None else self._metrics.running).dec()
        self._metrics.generation_tokens.inc(sum(answer.completion_tokens for answer in self.answers))

    async def updates(self) -> AsyncGenerator[list[Update], None]:
        """Yield what arrived, at latest every `wait_s` (then empty), until every answer is complete."""
        while not all(answer.is_complete for answer in self.answers):
            try:
                async with asyncio.timeout(self.wait_s):
                    arrived = [await self._queue.get()]
            except TimeoutError:
                yield []
                continue
            while not self._queue.empty():
                arrived.append(self._queue.get_nowait())
            news: list[Update] = []
            failure: ApiError | None = None
            for index, batch in arrived:
                try:
                    news += self._take(index, batch)
                except ApiError as error:  # what came before it is still the client's
                    failure = error
                    break
            if news:
                yield news
            if failure is not None:
                raise failure

    def _take(self, index: int, batch: TokenBatch | ApiError) -> list[Update]:
        """Turn one arrival into at most one update. Raises the error that arrived, or a bad ending."""
        if isinstance(batch, ApiError):
            raise batch
        answer = self.answers[index]
        if answer.is_complete:
            return []  # it was cut at a stop string while this batch was queued
        if batch.token_ids:
            self._observe(len(batch.token_ids))
        delta = answer.push(batch)
        if delta.finish_reason is not None:
            self._end(index, delta.finish_reason)
        return [(index, delta)] if delta else []

    def _observe(self, tokens: int) -> None:
        now = time.time()
        if self._last_s is None:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.ttft.observe(max(0.0, now - self._jobs[0].arrival_us / 1e6))
        else:
            self._metrics.itl.observe(max(0.0, now - self._last_s) / tokens)
        self._last_s = now

    def _end(self, index: int, finish_reason: str) -> None:
        answer = self.answers[index]
        self._pumps[index].cancel()
        self._metrics.count_finish(finish_reason)
        self._metrics.output_length.observe(answer.completion_tokens)
        self._metrics.e2e.observe(max(0.0, time.time() - self._jobs[index].arrival_us / 1e6))
        if index == 0:
            self._metrics.cached_tokens.inc(answer.cached_tokens or 0)

    async def _pump(self, index: int) -> None:
        """Move one sequence's batches into the queue; any failure becomes the last item."""
        job = self._jobs[index]
        timeout = asyncio.timeout(job.deadline_us / 1e6 - time.time())
        try:
            async with timeout, aclosing(self._service.submit(job)) as batches:
                async for batch in batches:
                    await self._queue.put((index, batch))
                    if batch.finish_reason is not None:
                        return
            raise EngineError("the answer ended without a reason")
        except ApiError as error:
            failure: ApiError = error
        except Exception:
            if timeout.expired():
                failure = DeadlineExceededError("the request's deadline passed")
            else:
                log.exception("request %s (%s): the service failed", job.request_id, job.client_request_id)
                failure = EngineError("internal error; the server's log has it under the request id")
        await self._queue.put((index, failure))
