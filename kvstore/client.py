"""The store's client in an engine or entrypoint process: gather, encode and write; locate, read and verify."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Event, Lock

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Kind, Located, Miss, Refused, StoredObject, StripeRecord
from shoal.kvstore.core.stripe import Checksums, Code, StripeShape, encode_stripe
from shoal.kvstore.fetch import Limits, Objects, StripeLost, StripeReader
from shoal.kvstore.host_cache import CacheUsage, HostCache, Name
from shoal.kvstore.io.buffers import BufferPool
from shoal.kvstore.ports import IndexPort, NodePort, failure_of
from shoal.kvstore.write import StripeWriter, WriteFailed


@dataclass(frozen=True, slots=True)
class Fetched:
    """What landed: `grains[i]` is the payload of keys[i], without gaps, `anchor` that of keys[anchor_grain - 1].

    `anchor_grain` 0 means nothing to resume from. `reason` says what ended the prefix ("" when all was had).
    `memory_bytes` of it came from the host cache, the rest from devices. Views stay valid as long as they are
    referenced.
    """

    grains: tuple[memoryview, ...]
    anchor_grain: int
    anchor: memoryview | None
    reason: str
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable stripe and how many of its objects the index did not have."""

    record: StripeRecord
    objects_new: int


Outcome = Saved | WriteFailed


class _Landing:
    """One fetch on its way: the grains that are there, in order, and the objects of the stripes read so far."""

    def __init__(self, located: Located, limits: Limits) -> None:
        self.located = located
        self.limits = limits
        self.grains: list[memoryview] = []
        self.objects: dict[int, Objects] = {}
        self.memory_bytes = 0
        self.reason = ""

    def from_stripe(self, stripe: int, name: Name) -> memoryview | Miss:
        """An object of a stripe that was read, or why it is not there."""
        return self.objects.get(stripe, {}).get(name, Miss("not in its stripe"))


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
        self._buffers = BufferPool(config.idle_bytes_max)
        self._reader = StripeReader((nodes, self._buffers.take), config, code, sums, clock_us)
        self._cache = HostCache(config.host_cache_bytes)
        self._lock = Lock()
        self._buffer: list[StoredObject] = []
        self._buffer_bytes = 0
        self._buffer_since_us = 0

    @property
    def memory(self) -> CacheUsage:
        """What the host cache holds and has served."""
        return self._cache.usage

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

    def save(self, objects: Sequence[StoredObject]) -> tuple[Outcome, ...]:
        """Write these objects as stripes of their own, in this thread, and return when they are durable or not.

        Nothing waits in the buffer, so the outcomes are of these objects alone; the last stripe may be small.
        """
        stripes: list[list[StoredObject]] = [[]]
        filled = 0
        for item in objects:
            if filled >= self._config.stripe_bytes:
                stripes.append([])
                filled = 0
            stripes[-1].append(item)
            filled += memoryview(item.payload).nbytes
        return tuple(self._save(stripe) for stripe in stripes if stripe)

    def fetch(
        self, keys: Sequence[bytes], anchor_grain: int, deadline_us: int, cancelled: Event | None = None
    ) -> Fetched:
        """Grains of `keys` in order until the first failure, and the anchor after `anchor_grain` grains.

        What the host cache holds is not read from devices; what is read is held there from then on. If the prefix
        lands shorter, the largest stored anchor within what landed is fetched instead. Ends by `deadline_us` of the
        client's clock. The prefix is pinned until this returns.
        """
        limits = Limits(deadline_us, cancelled or Event())
        located = self._locate(keys, anchor_grain, limits)
        if isinstance(located, Miss):
            return Fetched((), 0, None, located.reason)
        try:
            landing = _Landing(located, limits)
            self._land(keys, (0, len(keys)), landing)
            return self._finish(keys, anchor_grain, landing, 0)
        finally:
            self._release(located)

    def fetch_parts(
        self, keys: Sequence[bytes], anchor_grain: int, deadline_us: int, cancelled: Event, part_grains: int
    ) -> Iterator[Fetched]:
        """`fetch` in pieces, so that a long prefix needs little memory: grains, then a last piece with the anchor.

        A piece has at least `part_grains` grains (the last may have less) and ends with a stripe, which is read once;
        the anchor's stripe is read again for it.
        Between pieces `reason` is ""; the last piece says what ended the prefix. The prefix is pinned until the
        iterator ends or is closed.
        """
        limits = Limits(deadline_us, cancelled)
        located = self._locate(keys, anchor_grain, limits)
        if isinstance(located, Miss):
            yield Fetched((), 0, None, located.reason)
            return
        try:
            start, reason = 0, ""
            while start < len(located.grain_stripes) and not reason:
                landing = _Landing(located, limits)
                stop = _part_end(located.grain_stripes, start + part_grains)
                self._land(keys, (start, stop), landing)
                start, reason = start + len(landing.grains), landing.reason
                yield Fetched(tuple(landing.grains), 0, None, "", landing.memory_bytes)
            last = _Landing(located, limits)
            last.reason = reason
            yield self._finish(keys, anchor_grain, last, start)
        finally:
            self._release(located)

    def _locate(self, keys: Sequence[bytes], anchor_grain: int, limits: Limits) -> Located | Miss:
        """The pinned prefix, or why the index did not say in time."""
        if not 0 <= anchor_grain <= len(keys):
            raise ValueError(
                f"anchor_grain = {anchor_grain} must lie in 0 to {len(keys)} keys; pass Match.anchor_grain"
            )
        future = self._index.locate(tuple(keys), self._owner)
        wait((future,), timeout=max(0, limits.deadline_us - self._clock_us()) / 1e6)
        if not future.done():
            future.add_done_callback(self._release_late)
            return Miss("deadline while the index was asked")
        failure = failure_of(future)
        return future.result() if failure is None else Miss(f"index: {failure}")

    def _land(self, keys: Sequence[bytes], span: tuple[int, int], landing: _Landing) -> None:
        """Grains of `span` (start, stop) from memory or else from their stripes in order of first use."""
        start, stop = span[0], min(span[1], len(landing.located.grain_stripes))
        names = keys[start:stop]
        held = [self._cache.get((Kind.GRAIN, key)) for key in names]
        wanted = tuple(zip(names, landing.located.grain_stripes[start:stop], held, strict=True))
        self._read_stripes(list(dict.fromkeys(stripe for _, stripe, view in wanted if view is None)), landing)
        for key, stripe, view in wanted:
            payload = landing.from_stripe(stripe, (Kind.GRAIN, key)) if view is None else view
            if isinstance(payload, Miss):
                landing.reason = landing.reason or payload.reason
                break
            landing.grains.append(payload)
            landing.memory_bytes += 0 if view is None else view.nbytes
        self._cache.keep([((Kind.GRAIN, key), view) for key, view in zip(names, landing.grains, strict=False)])

    def _finish(self, keys: Sequence[bytes], anchor_grain: int, landing: _Landing, landed: int) -> Fetched:
        """The anchor for what has landed, `landed` grains in pieces before this one, and what ended the prefix."""
        total = landed + len(landing.grains)
        if not landing.reason and total < len(keys):
            landing.reason = f"{total} of {len(keys)} grains stored"
        count, anchor = self._anchor(keys, min(anchor_grain, total), landing)
        if anchor_grain and not count:
            landing.reason = landing.reason or "no anchor stored"
        if anchor is not None:
            self._cache.keep([((Kind.ANCHOR, keys[count - 1]), anchor)])
        return Fetched(tuple(landing.grains), count, anchor, landing.reason, landing.memory_bytes)

    def _anchor(self, keys: Sequence[bytes], limit: int, landing: _Landing) -> tuple[int, memoryview | None]:
        """The largest anchor at or below `limit` grains that can be had; (0, None) if none."""
        located = landing.located
        for count, stripe in reversed(list(zip(located.anchors, located.anchor_stripes, strict=True))):
            if count > limit:
                continue
            name = (Kind.ANCHOR, keys[count - 1])
            if (view := self._cache.get(name)) is not None:
                landing.memory_bytes += view.nbytes
                return count, view
            if stripe not in landing.objects:
                self._read_stripes([stripe], landing)
            payload = landing.from_stripe(stripe, name)
            if isinstance(payload, memoryview):
                return count, payload
            if landing.limits.cancelled.is_set() or self._clock_us() >= landing.limits.deadline_us:
                break
        return 0, None

    def _read_stripes(self, places: list[int], landing: _Landing) -> None:
        """Add the objects of each stripe that can be had, up to the first that cannot, and say why."""
        located = landing.located
        results = self._reader.read([located.stripes[place] for place in places], landing.limits)
        for place, result in zip(places, results, strict=False):
            record = located.stripes[place]
            if isinstance(result, StripeLost):
                if result.is_certain:
                    self._index.report_lost(record.stripe_id, record.generation)
                landing.reason = f"stripe {record.stripe_id.hex()} lost: {'; '.join(result.reasons)}"
            elif isinstance(result, Miss):
                landing.reason = result.reason
            else:
                landing.objects[place] = result
                if any(isinstance(item, Miss) for item in result.values()):
                    # Fragments verified, yet a payload does not fit its key: the stripe was written wrong.
                    self._index.report_lost(record.stripe_id, record.generation)

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
        stripe = encode_stripe(shape, objects, self._code, self._sums, self._buffers.take)
        written = self._writer.write(stripe)
        if isinstance(written, WriteFailed):
            return written
        future = self._index.insert(written)
        wait((future,), timeout=self._config.write_timeout_us / 1e6)
        failure = failure_of(future) if future.done() else "no answer in time"
        if failure is not None:
            return WriteFailed(len(objects), (f"durable, but the index did not take it: {failure}",))
        self._cache.keep([((entry.kind, entry.key), stripe.payload_of(entry)) for entry in stripe.table])
        return Saved(written, future.result())


def _part_end(grain_stripes: Sequence[int], at_least: int) -> int:
    """The first grain at or after `at_least` that begins another stripe than the one before it."""
    end = min(at_least, len(grain_stripes))
    while end < len(grain_stripes) and grain_stripes[end] == grain_stripes[end - 1]:
        end += 1
    return end
