"""Saves an engine's finished grains and anchors to the store, in the background, a stripe at a time.

One thread owns the puts. The step loop hands over copies and never waits: beyond the buffer's bound, grains are let
go (a cache may lose, it must not stall an answer), and counted.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.cluster.live.clock import now_us
from shoal.cluster.live.submission import Origin
from shoal.kvstore.client import Outcome, StoreClient
from shoal.kvstore.client import Saved as SavedStripe
from shoal.kvstore.core.records import Kind, Refused, StoredObject

log = logging.getLogger(__name__)

QUEUE_BYTES_MAX = 256 << 20  # copies in host memory: about 2,300 grains of the published model
IDLE_S = 0.05


class MissingPort(Protocol):
    """Which of these grains the store lacks; waits a bounded time and says "all" when it cannot be asked."""

    def __call__(self, keys: tuple[bytes, ...]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored."""


@dataclass(frozen=True, slots=True)
class ToSave:
    """One object and whose sequence produced it."""

    origin: Origin
    stored: StoredObject


class Saver:
    """Put queue of one engine. `on_saved(origin, grains, anchors)` is called from the saving thread."""

    def __init__(self, client: StoreClient, missing: MissingPort, on_saved: Callable[[Origin, int, int], None]) -> None:
        self._client = client
        self._missing = missing
        self._on_saved = on_saved
        self._queue: queue.SimpleQueue[Sequence[ToSave]] = queue.SimpleQueue()
        self._owners: dict[tuple[Kind, bytes], Origin] = {}
        self._bytes_lock = threading.Lock()
        self._bytes = 0  # taken and not yet given to the client
        self.dropped = 0
        self.failed = 0
        self._is_closed = False
        threading.Thread(target=self._run, name="saver", daemon=True).start()

    def save(self, objects: Sequence[ToSave]) -> None:
        """Take objects of one step, or drop and count them when the queue is full."""
        size = _bytes_of(objects)
        with self._bytes_lock:
            if self._bytes + size > QUEUE_BYTES_MAX:
                self.dropped += len(objects)
                return
            self._bytes += size
        self._queue.put(objects)

    def close(self) -> None:
        """Stop saving; what is queued is lost."""
        self._is_closed = True

    @property
    def is_idle(self) -> bool:
        """Whether everything taken has been written (or given up)."""
        return not self._bytes and not self._owners

    def _run(self) -> None:
        while not self._is_closed:
            try:
                batch = list(self._queue.get(timeout=IDLE_S))
            except queue.Empty:
                batch = []
            try:
                if batch:
                    self._put(batch)
                self._settle(self._client.flush(now_us()))
            except Exception:  # a failed save loses a cache entry; the thread must go on
                log.exception("saving failed")
                self._owners.clear()
            finally:
                with self._bytes_lock:
                    self._bytes -= _bytes_of(batch)

    def _put(self, batch: list[ToSave]) -> None:
        keys = tuple(dict.fromkeys(item.stored.key for item in batch if item.stored.kind is Kind.GRAIN))
        known = {key for key, is_missing in zip(keys, self._missing(keys), strict=True) if not is_missing}
        fresh = [item for item in batch if item.stored.kind is Kind.ANCHOR or item.stored.key not in known]
        for item in fresh:
            self._owners[item.stored.kind, item.stored.key] = item.origin
        answer = self._client.put([item.stored for item in fresh])
        if isinstance(answer, Refused):
            log.warning("store refused %d objects: %s", len(fresh), answer.reason)
            self.dropped += len(fresh)
            self._owners.clear()
            return
        self._settle(answer)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Tell each sequence how many of its objects are durable."""
        counts: dict[Origin, list[int]] = {}
        for outcome in outcomes:
            if not isinstance(outcome, SavedStripe):
                self.failed += 1
                log.warning("stripe not saved: %s", "; ".join(outcome.reasons))
                self._owners.clear()
                continue
            for entry in outcome.record.table:
                origin = self._owners.pop((entry.kind, entry.key), None)
                if origin is not None:
                    counts.setdefault(origin, [0, 0])[entry.kind is Kind.ANCHOR] += 1
        for origin, (grains, anchors) in counts.items():
            self._on_saved(origin, grains, anchors)


def _bytes_of(objects: Sequence[ToSave]) -> int:
    return sum(memoryview(item.stored.payload).nbytes for item in objects)
