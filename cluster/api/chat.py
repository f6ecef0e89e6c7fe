"""From a raw request to a streamed or whole answer, with every wait bounded; a dialect reads it and shapes choices."""

import asyncio
import logging
import re
import secrets
import threading
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from shoal.cluster.api import events
from shoal.cluster.api.answer import Answer, Delta
from shoal.cluster.api.body import SEED_MAX, SamplingBody
from shoal.cluster.api.codec import ChatCodec, Prompt
from shoal.cluster.api.dialect import Dialect, Shape
from shoal.cluster.api.dialect import Request as Asked
from shoal.cluster.api.errors import (
    ApiError,
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    FullError,
    NotFoundError,
    SlowBodyError,
    TooLargeError,
)
from shoal.cluster.api.jobs import ChatJob, ChatService, TrafficClass
from shoal.cluster.api.metrics import ApiMetrics
from shoal.cluster.api.running import CLOSE_S, Run, Update
from shoal.cluster.api.settings import ApiSettings
from shoal.engines.core.request import SamplingParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)
SEND_GRACE_S = 5.0  # how long after the deadline a slow client may still read the end of its answer
SLOW_FIELDS = (b"image_url", b"response_format", b"structured_outputs", b"guided_", b"tools")  # images, grammars
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds a body: when it came, by when it must be answered (Unix seconds), what the client calls it.

    `is_urgent`: the client said by when.
    """

    arrival_s: float
    deadline_s: float
    client_request_id: str
    is_urgent: bool = False


class ChatDesk:
    """Everything a chat request needs that outlives it."""

    def __init__(
        self,
        service: ChatService,
        codec: ChatCodec,
        settings: ApiSettings,
        metrics: ApiMetrics,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.service = service
        self.settings = settings
        self.metrics = metrics
        self._codec = codec
        self._pool = pool
        self._places = threading.Semaphore(settings.prepare_queue_max)

    async def prepare(self, dialect: Dialect, raw: bytes) -> tuple[Asked, Prompt]:
        """Parse, check and tokenise; what takes long goes to a thread, so that streams go on. Raises ApiError."""
        if len(raw) <= self.settings.inline_body_bytes and not any(name in raw for name in SLOW_FIELDS):
            return self._prepare(dialect, raw)
        if not self._places.acquire(blocking=False):
            raise FullError(1.0, "too many large requests are being prepared; retry later")
        work = self._pool.submit(self._prepare, dialect, raw)
        work.add_done_callback(lambda _: self._places.release())  # also when the client left and nobody waits
        return await asyncio.wrap_future(work)

    def _prepare(self, dialect: Dialect, raw: bytes) -> tuple[Asked, Prompt]:
        asked = dialect.read(raw, self._codec, self.settings)
        body = asked.body
        if body.model not in self.service.models:
            served = ", ".join(self.service.models)
            raise NotFoundError(
                f"model = {body.model[:80]!r} is not served here; use one of: {served}",
                param="model",
                code="model_not_found",
            )
        return asked, asked.encode()

    def run(self, body: SamplingBody, prompt: Prompt, envelope: Envelope, response_id: str) -> Run:
        """One job and one answer for each choice."""
        jobs = make_jobs(body, prompt, envelope, response_id)
        answers = [
            Answer(
                self._codec.tokens,
                self._codec.decoder(prompt),
                body.stops,
                body.alternatives is not None,
                body.min_tokens or 0,
            )
            for _ in jobs
        ]
        self.metrics.prompt_tokens.inc(len(prompt.token_ids))
        self.metrics.prompt_length.observe(len(prompt.token_ids))
        self.metrics.images.inc(len(prompt.spans))
        wait_s = self.settings.status_grace_s if body.stream else self.settings.keepalive_s
        return Run(self.service, jobs, answers, self.metrics, wait_s)


def make_jobs(body: SamplingBody, prompt: Prompt, envelope: Envelope, response_id: str) -> list[ChatJob]:
    """The jobs of a request: choice i has the client's seed (or a random one) plus i, as vLLM has it.

    So choice i is what a request of its own with seed + i gets.
    """
    n = body.n or 1
    seed = secrets.randbelow(SEED_MAX) if body.seed is None else body.seed
    seeds = [(seed + choice) & SEED_MAX for choice in range(n)]
    names = [f"{response_id}-{choice}" for choice in range(n)]
    return [
        ChatJob(
            request_id=names[choice],
            token_ids=prompt.token_ids,
            sampling=_sampling(body, prompt.tokens_max, seeds[choice]),
            spans=prompt.spans,
            canvases=prompt.canvases,
            stop=body.stops,
            traffic_class=body.traffic_class or TrafficClass.CHAT,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            arrival_us=int(envelope.arrival_s * 1e6),
            deadline_us=int(envelope.deadline_s * 1e6),
            client_request_id=envelope.client_request_id,
            choice=choice,
            n=n,
            leader=names[0] if choice else "",
            followers=() if choice else tuple(zip(names[1:], seeds[1:], strict=True)),
            grammar=prompt.grammar,
            user=body.user or "",
            is_urgent=envelope.is_urgent,
            prompt_logprobs=body.prompt_alternatives,
        )
        for choice in range(n)
    ]


def _sampling(body: SamplingBody, tokens_max: int, seed: int) -> SamplingParams:
    """What the client asked for, literally: greedy stays greedy in thinking mode too. Engines know their EOS."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,
        min_p=body.min_p or 0.0,
        seed=seed,
        max_tokens=tokens_max,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.alternatives,
        min_tokens=body.min_tokens or 0,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
    )


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The request's bytes, never more than the limit in memory. Raises TooLargeError or SlowBodyError."""
    limit = settings.body_bytes_max
    declared = request.headers.get("content-length", "0")
    error = TooLargeError(f"the body is over the limit of {limit} bytes; send less or smaller images")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
        raise error
    chunks, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise error
                chunks.append(chunk)
    except TimeoutError as timeout:
        raise SlowBodyError(f"the body did not arrive within {settings.body_timeout_s:g} s") from timeout
    return b"".join(chunks)


def read_envelope(request: Request, settings: ApiSettings, client_request_id: str) -> Envelope:
    """Arrival and deadline; `x-deadline-ms` is milliseconds from arrival and can only shorten the server's limit."""
    arrival = time.time()
    wish = request.headers.get("x-deadline-ms")
    limit = settings.request_timeout_s
    if wish is not None:
        if not re.fullmatch(r"[1-9][0-9]{0,9}", wish):
            name = "x-deadline-ms"
            raise BadRequestError(f"{name} = {wish[:40]!r} must be whole milliseconds from 1", param=name)
        limit = min(limit, int(wish) / 1000)
    return Envelope(arrival, arrival + limit, client_request_id, is_urgent=wish is not None)


class ChatResponse(Response):
    """The answer to one request, computed while it is sent; leaving early for any reason aborts its sequences."""

    def __init__(self, desk: ChatDesk, dialect: Dialect, raw: bytes, envelope: Envelope) -> None:
        super().__init__()
        self._dialect = dialect
        self._desk = desk
        self._raw = raw
        self._envelope = envelope
        self._seen: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away first. Raises ApiError while a status can still be chosen."""
        if not await _unless_gone(receive, self._answer(scope, send)):
            self._desk.metrics.aborted.inc()
            log.info("request %s: the client went away", self._envelope.client_request_id)

    async def _answer(self, scope: Scope, send: Send) -> None:
        envelope, desk = self._envelope, self._desk
        try:
            async with asyncio.timeout(envelope.deadline_s + SEND_GRACE_S - time.time()):
                asked, prompt = await desk.prepare(self._dialect, self._raw)
                body, shape = asked.body, asked.shape(prompt)
                if time.time() > envelope.deadline_s:
                    raise DeadlineExceededError("the request's deadline passed before it could start")
                head = events.Head(
                    id=f"{self._dialect.id_prefix}{uuid.uuid4().hex}",
                    model=body.model,
                    created=int(envelope.arrival_s),
                    is_stream=bool(body.stream),
                    with_usage=body.stream_options is not None and body.stream_options.include_usage,
                    kinds=self._dialect.kinds,
                )
                async with desk.run(body, prompt, envelope, head.id) as run:
                    if body.stream:
                        await self._stream(run, head, shape, len(prompt.token_ids), send)
                        return
                    whole = await self._whole(run, head, shape, len(prompt.token_ids))
                await Response(whole, media_type="application/json")(scope, _never, send)
        except TimeoutError as error:
            raise DeadlineExceededError("the request's deadline passed") from error

    async def _whole(self, run: Run, head: events.Head, shape: Shape, prompt_tokens: int) -> bytes:
        deltas: list[list[Delta]] = [[] for _ in run.answers]
        async with aclosing(run.updates()) as updates:
            async for update in updates:
                for index, delta in update:
                    deltas[index].append(delta)
        for answer in run.answers[1:]:  # one prompt, scored once
            answer.prompt_scores = run.answers[0].prompt_scores
        choices = [shape.whole(index, deltas[index], answer) for index, answer in enumerate(run.answers)]
        response = head.wrap(choices, events.usage_of(prompt_tokens, run.answers))
        return events.to_json(response | shape.around(run.answers))

    async def _stream(self, run: Run, head: events.Head, shape: Shape, prompt_tokens: int, send: Send) -> None:
        """Send events as they come. Until the first one a refusal still gets its own status; later it is an event."""
        is_open = False
        try:
            async with aclosing(run.updates()) as updates:
                async for update in updates:
                    if not is_open:
                        headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        is_open, run.wait_s = True, self._desk.settings.keepalive_s
                    text = self._events(update, head, shape) if update else events.KEEPALIVE
                    await send({"type": "http.response.body", "body": text, "more_body": True})
            last = b""
            if head.with_usage:
                last = events.event(head.wrap([], events.usage_of(prompt_tokens, run.answers)))
        except ApiError as error:
            if not is_open:
                raise
            log.warning("request %s: failed while streaming: %s", self._envelope.client_request_id, error.message)
            last = events.event(error.body())
        except Exception:
            if not is_open:
                raise
            log.exception("request %s: failed while streaming", self._envelope.client_request_id)
            last = events.event(EngineError("internal error; the server's log has it under the request id").body())
        await send({"type": "http.response.body", "body": last + events.DONE, "more_body": False})

    def _events(self, updates: list[Update], head: events.Head, shape: Shape) -> bytes:
        """One event for each update; the first of a choice is preceded by its opening."""
        parts = []
        for index, delta in updates:
            if index not in self._seen:
                self._seen.add(index)
                parts.append(events.event(head.wrap([shape.opening(index)])))
            parts.append(events.event(head.wrap([shape.chunk(index, delta)])))
        return b"".join(parts)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or cancel it when the client disconnects; returns whether it ended by itself."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        gone.cancel()
        working.cancel()
        _, stuck = await asyncio.wait({working, gone}, timeout=CLOSE_S)
        if stuck:
            log.error("a cancelled request did not end within %g s", CLOSE_S)
        elif not working.cancelled():
            working.exception()  # read, so that a failure while leaving is not reported as never retrieved


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    raise AssertionError("a finished response reads nothing")
