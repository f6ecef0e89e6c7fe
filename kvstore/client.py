"""The store's client in an engine or entrypoint process: gather, encode and write; locate, read and verify."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Event, Lock

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Kind, Located, Miss, Refused, StoredObject, StripeRecord
from shoal.kvstore.core.stripe import Checksums, Code, StripeShape, encode_stripe
from shoal.kvstore.fetch import Limits, Objects, StripeLost, StripeReader
from shoal.kvstore.ports import IndexPort, NodePort, failure_of
from shoal.kvstore.write import StripeWriter, WriteFailed


@dataclass(frozen=True, slots=True)
class Fetched:
    """What landed: `grains[i]` is the payload of keys[i], without gaps, `anchor` that of keys[anchor_grain - 1].

    `anchor_grain` 0 means nothing to resume from. `reason` says what ended the prefix ("" when all was had).
    Views stay valid as long as they are referenced.
    """

    grains: tuple[memoryview, ...]
    anchor_grain: int
    anchor: memoryview | None
    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable stripe and how many of its objects the index did not have."""

    record: StripeRecord
    objects_new: int


Outcome = Saved | WriteFailed


class StoreClient:
    """Put and fetch over ports. Thread-safe: `put` and `flush` may run on a background thread beside `fetch`."""

    def __init__(
        self,
        ports: tuple[IndexPort, Mapping[str, NodePort]],
        config: StoreConfig,
        code: Code,
        sums: Checksums,
        clock_us: Callable[[], int],
        owner: str,
    ) -> None:
        """`clock_us` is wall time in microseconds; `owner` names this process in the index's pins.

        The node mapping may change while the client lives: a node that left is an erasure.
        """
        self._index, nodes = ports
        self._config = config
        self._code = code
        self._sums = sums
        self._clock_us = clock_us
        self._owner = owner
        self._writer = StripeWriter(nodes, config, clock_us)
        self._reader = StripeReader(nodes, config, code, sums, clock_us)
        self._lock = Lock()
        self._buffer: list[StoredObject] = []
        self._buffer_bytes = 0
        self._buffer_since_us = 0

    def put(self, objects: Sequence[StoredObject]) -> tuple[Outcome, ...] | Refused:
        """Buffer objects and write every stripe they fill, in this thread; Refused (nothing taken) if over the cap.

        A grain's predecessors should be put first. Payloads are copied when their stripe is sealed, and must not
        change until then.
        """
        size = sum(memoryview(item.payload).nbytes for item in objects)
        with self._lock:
            if self._buffer_bytes + size > self._config.buffer_bytes_max:
                return Refused(f"buffer holds {self._buffer_bytes} of {self._config.buffer_bytes_max} bytes: put less")
            if not self._buffer:
                self._buffer_since_us = self._clock_us()
            self._buffer += objects
            self._buffer_bytes += size
            sealed = self._take_full()
        return tuple(self._save(stripe) for stripe in sealed)

    def flush(self, now_us: int | None = None) -> tuple[Outcome, ...]:
        """Write what is buffered: all of it, or with `now_us` only if the oldest has waited `flush_us`."""
        with self._lock:
            is_due = now_us is None or now_us - self._buffer_since_us >= self._config.flush_us
            if not self._buffer or not is_due:
                return ()
            sealed = [*self._take_full(), self._buffer]
            self._buffer, self._buffer_bytes = [], 0
        return tuple(self._save(stripe) for stripe in sealed if stripe)

    def fetch(
        self, keys: Sequence[bytes], anchor_grain: int, deadline_us: int, cancelled: Event | None = None
    ) -> Fetched:
        """Grains of `keys` in order until the first failure, and the anchor after `anchor_grain` grains.

        If the prefix lands shorter, the largest stored anchor within what landed is fetched instead. Ends by
        `deadline_us` of the client's clock. The prefix is pinned until this returns.
        """
        if not 0 <= anchor_grain <= len(keys):
            raise ValueError(
                f"anchor_grain = {anchor_grain} must lie in 0 to {len(keys)} keys; pass Match.anchor_grain"
            )
        limits = Limits(deadline_us, cancelled or Event())
        future = self._index.locate(tuple(keys), self._owner)
        wait((future,), timeout=max(0, deadline_us - self._clock_us()) / 1e6)
        if not future.done():
            future.add_done_callback(self._release_late)
            return Fetched((), 0, None, "deadline while the index was asked")
        failure = failure_of(future)
        if failure is not None:
            return Fetched((), 0, None, f"index: {failure}")
        located = future.result()
        try:
            return self._fetch(keys, anchor_grain, located, limits)
        finally:
            self._release(located)

    def _fetch(self, keys: Sequence[bytes], anchor_grain: int, located: Located, limits: Limits) -> Fetched:
        """Read the grains' stripes in order of first use, then the anchor's, which is often one of them."""
        wanted = located.grain_stripes[: len(keys)]
        objects: dict[int, Objects] = {}
        reason = self._read_stripes(list(dict.fromkeys(wanted)), located, limits, objects)
        grains: list[memoryview] = []
        for key, stripe in zip(keys, wanted, strict=False):
            payload = objects.get(stripe, {}).get((Kind.GRAIN, key), Miss("not in its stripe"))
            if isinstance(payload, Miss):
                reason = reason or payload.reason
                break
            grains.append(payload)
        if not reason and len(grains) < len(keys):
            reason = f"{len(grains)} of {len(keys)} grains stored"
        return self._with_anchor(keys, (anchor_grain, reason), located, limits, (grains, objects))

    def _with_anchor(
        self,
        keys: Sequence[bytes],
        asked: tuple[int, str],
        located: Located,
        limits: Limits,
        landed: tuple[list[memoryview], dict[int, Objects]],
    ) -> Fetched:
        """The largest anchor at or below the one asked that can be had within the grains that landed."""
        (anchor_grain, reason), (grains, objects) = asked, landed
        limit = min(anchor_grain, len(grains))
        for count, stripe in reversed(list(zip(located.anchors, located.anchor_stripes, strict=True))):
            if count > limit:
                continue
            if stripe not in objects:
                reason = self._read_stripes([stripe], located, limits, objects) or reason
            payload = objects.get(stripe, {}).get((Kind.ANCHOR, keys[count - 1]))
            if isinstance(payload, memoryview):
                return Fetched(tuple(grains), count, payload, reason)
            if self._clock_us() >= limits.deadline_us or limits.cancelled.is_set():
                break
        return Fetched(tuple(grains), 0, None, reason or ("no anchor stored" if anchor_grain else ""))

    def _read_stripes(self, places: list[int], located: Located, limits: Limits, objects: dict[int, Objects]) -> str:
        """Add the objects of each stripe that can be had; the reason for stopping early, or ""."""
        results = self._reader.read([located.stripes[place] for place in places], limits)
        for place, result in zip(places, results, strict=False):
            if isinstance(result, StripeLost):
                if result.is_certain:
                    self._index.report_lost(result.record.stripe_id, result.record.generation)
                return f"stripe {result.record.stripe_id.hex()} lost: {'; '.join(result.reasons)}"
            if isinstance(result, Miss):
                return result.reason
            objects[place] = result
            if any(isinstance(item, Miss) for item in result.values()):
                # Fragments verified, yet a payload does not fit its key: the stripe was written wrong.
                record = located.stripes[place]
                self._index.report_lost(record.stripe_id, record.generation)
        return ""

    def _release(self, located: Located) -> None:
        if located.pin:
            self._index.release(located.pin)

    def _release_late(self, future: Future[Located]) -> None:
        if failure_of(future) is None:
            self._release(future.result())

    def _take_full(self) -> list[list[StoredObject]]:
        """Cut whole stripes off the buffer's front. Called with the lock held."""
        sealed: list[list[StoredObject]] = []
        start = filled = 0
        for at, item in enumerate(self._buffer):
            filled += memoryview(item.payload).nbytes
            if filled >= self._config.stripe_bytes:
                sealed.append(self._buffer[start : at + 1])
                self._buffer_bytes -= filled
                start, filled = at + 1, 0
        if start:
            self._buffer = self._buffer[start:]
            self._buffer_since_us = self._clock_us()
        return sealed

    def _save(self, objects: Sequence[StoredObject]) -> Outcome:
        """Encode and write one stripe, then offer it to the index: nothing is offered before it is durable."""
        shape = StripeShape(os.urandom(16), 1, self._config.code.data, self._config.code.parity, self._clock_us())
        written = self._writer.write(encode_stripe(shape, objects, self._code, self._sums))
        if isinstance(written, WriteFailed):
            return written
        future = self._index.insert(written)
        wait((future,), timeout=self._config.write_timeout_us / 1e6)
        failure = failure_of(future) if future.done() else "no answer in time"
        if failure is not None:
            return WriteFailed(len(objects), (f"durable, but the index did not take it: {failure}",))
        return Saved(written, future.result())
