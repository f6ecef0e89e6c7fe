"""A scripted ChatService behind a real HTTP server on a loopback port."""

import asyncio
import base64
import hashlib
import io
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import openai
import uvicorn
from PIL import Image
from shoal.cluster.api.app import create_app
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.images import PreparedImage
from shoal.cluster.api.jobs import TokenBatch
from shoal.cluster.api.settings import ApiSettings
from shoal.engines.core.request import FinishReason, TokenLogprobs
from tokenizers import Tokenizer

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
TOKENIZER = Tokenizer.from_file(str(ORACLE / "tokenizer.json"))
EOS = 1
MODEL = "shoal-toy"


class PadTo42:
    """A layout rule of its own: pad right and below to whole 42-pixel cells."""

    def prepare(self, pixels):
        height, width, _ = pixels.shape
        rows, columns = -(-height // 42), -(-width // 42)
        canvas = np.full((rows * 42, columns * 42, 3), 127, np.uint8)
        canvas[:height, :width] = pixels
        return PreparedImage(canvas, rows, columns, hashlib.sha256(canvas.tobytes()).digest())


CODEC = ChatCodec.from_file(ORACLE, PadTo42())


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def batches(token_ids, size=1, finish=FinishReason.STOP, cached=None):
    """The tokens cut into batches; the last one finishes."""
    pieces = [tuple(token_ids[at : at + size]) for at in range(0, len(token_ids), size)] or [()]
    out = [TokenBatch(piece) for piece in pieces[:-1]]
    return [*out, TokenBatch(pieces[-1], finish_reason=finish, cached_tokens=cached)]


def with_logprobs(batch):
    """The same batch with made-up log-probabilities, two alternatives a token."""
    entries = tuple(TokenLogprobs(-0.5, ((i, -0.5), (i + 1, -1.5))) for i in batch.token_ids)
    return TokenBatch(batch.token_ids, entries, batch.finish_reason, batch.cached_tokens)


@dataclass
class ScriptedService:
    """Plays what the test wrote: batches, pauses in seconds, exceptions, or a function of the job giving those."""

    script: object = ()
    jobs: list = field(default_factory=list)
    closed: dict = field(default_factory=dict)  # request id -> how the iterator ended
    is_ready: bool = True
    metrics: object = ""
    models: tuple = (MODEL, "shoal-alias")
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self):
        """Forget everything."""
        self.jobs, self.closed, self.is_ready, self.metrics, self.script = [], {}, True, "", ()

    def ready(self):
        return self.is_ready

    async def metrics_text(self):
        if isinstance(self.metrics, Exception):
            raise self.metrics
        return self.metrics

    async def submit(self, job):
        self.jobs.append(job)
        closed = self.closed
        self.changed.set()
        ending = "aborted"
        try:
            for act in self.script(job) if callable(self.script) else self.script:
                if isinstance(act, Exception):
                    ending = "failed"
                    raise act
                if isinstance(act, float):
                    await asyncio.sleep(act)
                elif act == "forever":
                    await asyncio.Event().wait()
                else:
                    if act.finish_reason is not None:
                        ending = "finished"
                    yield act
        finally:
            closed[job.request_id] = ending
            self.changed.set()

    async def until(self, condition):
        """Wait for a change of the records that makes `condition` true."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class World:
    service: ScriptedService
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    port: int

    def play(self, text, size=1, **keywords):
        """Answer every job with this text."""
        self.service.script = batches(ids_of(text), size, **keywords)

    async def chat(self, content="hi", **keywords):
        """One request of the openai package, thinking off unless `extra_body` says otherwise."""
        extra = {"thinking": {"type": "disabled"}, **keywords.pop("extra_body", {})}
        messages = keywords.pop("messages", [{"role": "user", "content": content}])
        return await self.client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **keywords)

    async def post(self, body=None, **keywords):
        """One raw request; `body` fields are laid over a valid request."""
        if body is not None:
            base = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
            keywords["json"] = {key: value for key, value in {**base, **body}.items() if value is not ...}
        return await self.http.post("/v1/chat/completions", **keywords)

    async def works(self):
        """The next request is answered as if nothing had happened."""
        self.play("still here")
        answer = await self.chat()
        assert answer.choices[0].message.content == "still here"


@asynccontextmanager
async def serve(**settings):
    """A server and its clients."""
    service = ScriptedService()
    app = create_app(service, CODEC, ApiSettings(**{"context_tokens": 4096, **settings}))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.005)
    base = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(max_connections=100)
    async with (
        httpx.AsyncClient(base_url=base, timeout=20, limits=limits) as http,
        openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="key", max_retries=0, timeout=20) as client,
    ):
        try:
            yield World(service, http, client, port)
        finally:
            server.should_exit = True
            await task


def picture(width=60, height=50, kind="PNG", mode="RGB"):
    """An encoded picture with something on it."""
    image = Image.new(mode, (width, height), "red" if mode in ("RGB", "RGBA") else 3)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def data_url(data, mime="image/png"):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}
