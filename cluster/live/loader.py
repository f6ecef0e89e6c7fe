"""Brings a store hit into a PROMPT engine: fetch in a worker thread, swap in between two steps.

The fetch runs while other requests compute. What lands short or late is reported as such, never filled in.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from shoal.cluster.live.clock import now_us
from shoal.cluster.live.step_loop import StepLoop
from shoal.engines.core.plan import LoadTarget
from shoal.engines.core.request import NoRoom, Rejected
from shoal.kvstore.client import Fetched, StoreClient

log = logging.getLogger(__name__)

FETCH_DEADLINE_US = 5_000_000
ROOM_RETRY_S = 0.01
WORKERS = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """A hit is in the engine: `target.tokens` tokens, fetched in `fetch_us`, `memory_bytes` of it from host memory."""

    target: LoadTarget
    fetch_bytes: int
    fetch_us: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The hit could not be had; the request still waits in the engine."""

    reason: str


class Loader:
    """Hits of one engine on their way in."""

    def __init__(
        self, client: StoreClient, steps: StepLoop, grain_tokens: int, on_loaded: Callable[[LoadTarget], None]
    ) -> None:
        """`on_loaded` is called before the output of any step that computes behind the hit."""
        self._client = client
        self._steps = steps
        self._grain_tokens = grain_tokens
        self._on_loaded = on_loaded
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="fetch")
        self._cancelled: dict[str, Event] = {}

    def cancel(self, sequence: str) -> None:
        """Stop fetching for a sequence that has ended."""
        if (event := self._cancelled.get(sequence)) is not None:
            event.set()

    def close(self) -> None:
        """Stop every fetch."""
        for event in self._cancelled.values():
            event.set()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _tell(self, target: LoadTarget | NoRoom | Rejected) -> None:
        if isinstance(target, LoadTarget):
            self._on_loaded(target)

    async def load(self, sequence: str, keys: Sequence[bytes], hit_tokens: int) -> Loaded | NotLoaded:
        """Fetch the first `hit_tokens` tokens' grains and their anchor and swap them in."""
        cancelled = self._cancelled[sequence] = Event()
        started_us = now_us()
        grains = hit_tokens // self._grain_tokens
        try:
            fetched: Fetched = await asyncio.get_running_loop().run_in_executor(
                self._workers, self._client.fetch, keys[:grains], grains, started_us + FETCH_DEADLINE_US, cancelled
            )
            if fetched.anchor is None or fetched.anchor_grain < grains or len(fetched.grains) < grains:
                return NotLoaded(f"{len(fetched.grains)} of {grains} grains landed: {fetched.reason}")
            fetch_us = now_us() - started_us
            payloads, anchor = [bytes(g) for g in fetched.grains], bytes(fetched.anchor)
            while not cancelled.is_set():
                target = await self._steps.call(lambda engine: engine.load_hit(sequence, payloads, anchor), self._tell)
                match target:
                    case LoadTarget():
                        size = sum(map(len, payloads)) + len(anchor)
                        return Loaded(target, size, fetch_us, fetched.memory_bytes)
                    case Rejected(_, reason):
                        return NotLoaded(reason)
                    case NoRoom():
                        await asyncio.sleep(ROOM_RETRY_S)  # blocks come back as other sequences end
            return NotLoaded("cancelled")
        finally:
            del self._cancelled[sequence]
