"""Verbs of the live tests: ask, kill, wait for a condition with a deadline, compare with the plain loop."""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from shoal.cluster.api.jobs import ChatJob
from shoal.cluster.core.timeline import RequestTimeline
from shoal.cluster.live.entrypoint import EntrypointService
from shoal.cluster.live.names import controller_name
from shoal.cluster.live.overview import overview
from shoal.cluster.live.session import NAMESPACE
from shoal.cluster.live.spec import ClusterSpec
from shoal.engines.core.request import EngineRequest, ImageSpan, SamplingParams
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.load import load_model
from shoal.engines.run.plain import replay
from shoal.engines.run.vision import VisionRunner

WAIT_S = 60.0


@dataclass
class Answer:
    """What one request got, and how."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    timeline: RequestTimeline | None = None


class World:
    """A live cluster as tests see it."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.http = f"http://{spec.cluster.api.host}:{spec.cluster.api.port}"
        self._model: WholeSequence | None = None
        self._vision: VisionRunner | None = None

    # ------------------------------------------------------------ asking

    @asynccontextmanager
    async def entrypoint(self) -> AsyncGenerator[EntrypointService, None]:
        """An entrypoint of our own, in this process: the same class that serves HTTP."""
        service = EntrypointService(self.spec, f"test-{uuid.uuid4().hex[:8]}", eos_token_id=1)
        service.start()
        try:
            async with asyncio.timeout(WAIT_S):
                while not service.ready():
                    await asyncio.sleep(0.02)
            yield service
        finally:
            service.tasks.cancel()

    async def ask(
        self, service: EntrypointService, job: ChatJob, on_tokens: Callable[[Answer], None] = lambda answer: None
    ) -> Answer:
        """One request to its end; `on_tokens` is called after each batch."""
        answer = Answer()
        async with asyncio.timeout(WAIT_S):
            async for batch in service.submit(job):
                answer.token_ids += batch.token_ids
                answer.cached_tokens = batch.cached_tokens or answer.cached_tokens
                answer.finish = str(batch.finish_reason or "")
                on_tokens(answer)
        answer.timeline = service.timeline(job.request_id)
        return answer

    def job(self, number: int, tokens: int, outputs: int, image: bool = False, **sampling: Any) -> ChatJob:
        """A random prompt of about `tokens` tokens, with a random picture in its middle if asked for."""
        rng = np.random.default_rng(number)
        ids = [0, *rng.integers(16, 900, tokens).tolist()]
        spans: tuple[ImageSpan, ...] = ()
        canvases: tuple[np.ndarray, ...] = ()
        if image:
            canvas = rng.integers(0, 256, (126, 126, 3)).astype(np.uint8)
            start, rows, columns = tokens // 2, 3, 3
            length = rows * (columns + 1) + 2
            ids[start:start] = [self.image_token_id] * length
            spans = (ImageSpan(start, length, rows, columns, digest=canvas.tobytes()[:32]),)
            canvases = (canvas,)
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": outputs, "ignore_eos": True} | sampling))
        return ChatJob(
            request_id=f"t{number}-{uuid.uuid4().hex[:8]}",
            token_ids=tuple(ids),
            sampling=params,
            spans=spans,
            canvases=canvases,
            cache_salt=str(number),
        )

    @property
    def image_token_id(self) -> int:
        return self.model()._model.config.image_token_id

    # ------------------------------------------------------------ the oracle

    def model(self) -> WholeSequence:
        if self._model is None:
            self._model = WholeSequence(load_model(Path(self.spec.model_dir)))
        return self._model

    def plain(self, job: ChatJob, outputs: list[int]) -> list[int]:
        """What the plain full-sequence loop answers, given that it answered `outputs` so far."""
        if self._vision is None and job.spans:
            self._vision = VisionRunner.load(Path(self.spec.model_dir))
        rows = {s.digest: self._vision.encode(c) for s, c in zip(job.spans, job.canvases, strict=True)}
        request = EngineRequest("plain", job.token_ids, len(job.token_ids), job.sampling, job.spans)
        truncation = self.spec.cluster.groups[0].engine.truncation
        return [drawn.token_id for drawn in replay(self.model(), request, outputs, rows, truncation)]

    # ------------------------------------------------------------ faults and facts

    def overview(self) -> dict[str, Any]:
        return overview(self.spec.name)

    def members(self, role: str) -> list[dict[str, Any]]:
        return [m for m in self.overview()["members"] if m["name"].rpartition("/")[0] == role]

    def member(self, name: str) -> dict[str, Any]:
        return next(m for m in self.overview()["members"] if m["name"] == name)

    def kill(self, name: str) -> None:
        """End a member's process at once, as a crash or the kernel would."""
        os.kill(self.member(name)["pid"], signal.SIGKILL)

    def controller(self) -> Any:
        return ray.get_actor(controller_name(self.spec.name), namespace=NAMESPACE)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
            time.sleep(0.1)

    def wait_healthy(self) -> None:
        def healthy() -> bool:
            try:
                return bool(self.overview()["healthy"])
            except Exception:
                return False

        self.wait("all members ready", healthy)

    def wait_replaced(self, name: str, epoch: int) -> None:
        self.wait(f"{name} has a life after epoch {epoch}", lambda: self.member(name)["epoch"] > epoch)
        self.wait_healthy()

    def replace_disks(self, *nodes: str) -> None:
        """Restart store nodes, which make the directories of their lost devices anew."""
        for node in nodes:
            epoch = self.member(node)["epoch"]
            self.kill(node)
            self.wait_replaced(node, epoch)

    def wait_empty(self) -> None:
        """No engine holds a sequence, a ticket, a block or a slot."""

        def held() -> list[dict[str, Any]]:
            engines = [m for m in self.overview()["members"] if m["name"].startswith(("prefill/", "decode/"))]
            return [m for m in engines if not is_empty(m.get("load"))]

        deadline = time.monotonic() + 30.0
        while still := held():
            assert time.monotonic() < deadline, f"engines still hold something: {still}"
            time.sleep(0.1)

    def replica_pids(self) -> list[int]:
        """Processes of the HTTP side's replicas."""
        import psutil

        return [p.pid for p in psutil.process_iter(["cmdline"]) if is_replica(p.info["cmdline"], self.spec.name)]


def is_replica(cmdline: list[str] | None, cluster: str) -> bool:
    """Whether a process title is that of a Serve replica of this cluster."""
    return bool(cmdline) and cmdline[0].startswith(f"ray::ServeReplica:{cluster}")


def is_empty(load: dict[str, Any] | None) -> bool:
    """Whether an engine that reports this load holds nothing."""
    if load is None or load["sequences"] or load["tickets"]:
        return False
    return bool(load["blocks_free"] == load["blocks_count"] and load["slots_free"] == load["slots_count"])
