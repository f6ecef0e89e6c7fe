"""The actor around a vision tower: one image at a time, equal images once, embeddings cached by digest."""

import asyncio
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError
from shoal.balancers.reports import EncodeReport, GroupRef
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.names import ENCODE_BALANCER
from shoal.cluster.live.rates import Rate
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.submission import Rows
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks

if TYPE_CHECKING:
    from shoal.engines.run.vision import Canvas, VisionRunner

log = logging.getLogger(__name__)

REPORT_S = 0.1
IMAGE_S = 120.0  # far above the largest image on a slow CPU (1,024 tokens of the released tower)
HUNG_EXIT = 73


class EncoderActor:
    """One encoder. Equal pixels asked for at once are computed once; every asker gets the same rows."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, place: Surroundings = RAY) -> None:
        begin_logging(str(group))
        self._spec, self._group = spec, group
        self._cache_bytes = spec.cluster.encoders[0].cache_bytes
        self._runner: VisionRunner | None = None
        self._put = place.put
        self._end = place.end
        self._directory = place.members(spec.name, lambda view: None)
        self._tasks = Tasks()
        self._rate = Rate()
        self._one_at_a_time = asyncio.Lock()
        self._cache: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[Any]] = {}
        self._waiting: dict[bytes, int] = {}
        self._fresh: list[str] = []
        self._seq = 0

    async def open(self) -> None:
        """Load the vision tower alone (torch is imported here: see EngineActor)."""
        import torch
        from shoal.engines.run.vision import VisionRunner

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._runner = await asyncio.to_thread(VisionRunner.load, Path(self._spec.model_dir))
        self._tasks.spawn(self._directory.follow())
        self._tasks.spawn(self._report_forever())

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._runner is not None

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """Returns when no image is waiting."""
        while self._waiting:
            await asyncio.sleep(REPORT_S)

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._tasks.cancel()

    async def encode(self, name: str, digest: bytes, patches: int, canvas: "Canvas") -> list[Any]:
        """[reference to `Rows`]: bfloat16 bits [span length, hidden]. The reference keeps the rows while it is held.

        An image that cannot be encoded raises ImageError here, and nothing else is affected.
        """
        self._fresh.append(name)
        if (cached := self._cache.get(digest)) is not None:
            self._cache.move_to_end(digest)
            return [cached[0]]
        if (running := self._running.get(digest)) is not None:
            return [await asyncio.shield(running)]
        future = self._running[digest] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.exception())  # seen by whoever joined; nobody else need look
        self._waiting[digest] = patches
        try:
            reference = await self._compute(digest, canvas)
        except Exception as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(reference)
            return [reference]
        finally:
            del self._running[digest], self._waiting[digest]

    async def abort(self, sequence: str, reason: str) -> None:
        """An image nobody waits for any more is still finished: its embedding is cached for the next asker."""

    async def _compute(self, digest: bytes, canvas: "Canvas") -> Any:
        runner = self._runner
        assert runner is not None, f"{self._group} is called before open() has returned"
        async with self._one_at_a_time:
            try:
                rows = await asyncio.wait_for(asyncio.to_thread(runner.encode, canvas), timeout=IMAGE_S)
            except TimeoutError:  # the thread cannot be ended, and with it nothing else here gets on
                log.critical("an image took more than %.0f s: this encoder ends, to come back in a new epoch", IMAGE_S)
                self._end(HUNG_EXIT)
                raise
        bits: Rows = rows.bfloat16().contiguous().view(dtype=_uint16()).numpy()
        self._rate.add(self._waiting[digest])
        reference = await asyncio.to_thread(self._put, bits)  # waits while the object store is full
        self._cache[digest] = (reference, bits.nbytes)
        while sum(size for _, size in self._cache.values()) > self._cache_bytes and len(self._cache) > 1:
            self._cache.popitem(last=False)
        return reference

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            balancer = self._directory.only(ENCODE_BALANCER)
            if balancer is None:
                continue
            self._seq += 1
            known, self._fresh = tuple(self._fresh), []
            report = EncodeReport(
                group=self._group, seq=self._seq, waiting_patches=sum(self._waiting.values()),
                patches_per_s=self._rate.per_s(), cached=tuple(self._cache), known=known,
                waiting_images=len(self._waiting),
            )  # fmt: skip
            try:
                await asyncio.wait_for(balancer.report.remote(report), timeout=1.0)
            except (RayError, TimeoutError):
                self._fresh += known


def _uint16() -> Any:
    """torch.uint16, imported late."""
    import torch

    return torch.uint16
