"""The verbs of `store.proto` over a store client and an index: checks, deadlines, cancellation, leases.

A client's mistake ends its own call with INVALID_ARGUMENT; an index that cannot be asked is UNAVAILABLE; too much at
once is RESOURCE_EXHAUSTED. Losses are no errors: a fetch says how far it came and why it ended there.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import randbits
from threading import Event, Lock
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from shoal.kvstore.client import Saved, StoreClient
from shoal.kvstore.core.records import Kind
from shoal.kvstore.errors import ObjectError
from shoal.kvstore.ports import QueryPort
from shoal.kvstore.rpc import store_pb2 as pb
from shoal.kvstore.rpc.inbox import Budget, BudgetExceededError, Inbox
from shoal.kvstore.rpc.leases import Leases
from shoal.kvstore.rpc.messages import keys_of, lease_us_of, match_to_wire, object_parts, parsed, traffic_of

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Message)

LIMIT_NONE = 1 << 62  # tokens: more than any prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """What one gateway takes. `call_s` is the deadline of a call that brings none, and the longest for any.

    `put_bytes_max` of puts are in memory at once; a fetch holds about two parts of `part_grains` grains.
    """

    call_s: float = 60.0
    object_bytes_max: int = 64 << 20
    put_bytes_max: int = 256 << 20
    part_grains: int = 32


class StoreServicer:
    """One gateway. Methods run in gRPC's threads, any number at a time."""

    def __init__(
        self,
        client: StoreClient,
        index: QueryPort,
        owner: str,
        clock_us: Callable[[], int],
        limits: Limits,
        version: str,
    ) -> None:
        """`owner` names this process in the index's pins: they end with it, whatever became of the clients."""
        self._client, self._index, self._owner = client, index, owner
        self._clock_us, self._limits, self._version = clock_us, limits, version
        self._budget = Budget(limits.put_bytes_max)
        self._leases = Leases()
        self._streams: dict[grpc.ServicerContext, int] = {}  # when each must have ended
        self._lock = Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service as a gRPC server takes it.

        Messages are parsed here: what grpcio (1.85) makes of one that is none is a traceback in the log, an INTERNAL
        for the client, and for a stream a state that is kept for ever.
        """
        unary, stream_out, stream_in = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
            grpc.stream_unary_rpc_method_handler,
        )
        verbs: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Match": unary(_parsed(pb.MatchRequest, self.match), None, pb.MatchReply.SerializeToString),
            "Missing": unary(_parsed(pb.MissingRequest, self.missing), None, pb.MissingReply.SerializeToString),
            "Fetch": stream_out(_parsed(pb.FetchRequest, self.fetch), None, pb.FetchPart.SerializeToString),
            "Put": stream_in(self.put, None, pb.PutReply.SerializeToString),
            "Pin": unary(_parsed(pb.PinRequest, self.pin), None, pb.PinReply.SerializeToString),
            "Release": unary(_parsed(pb.ReleaseRequest, self.release), None, pb.ReleaseReply.SerializeToString),
            "Stats": unary(_parsed(pb.StatsRequest, self.stats), None, pb.StatsReply.SerializeToString),
        }
        return grpc.method_handlers_generic_handler("shoal.store.v1.Store", verbs)

    def match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchReply:
        """Longest stored prefix and its usable anchor."""
        with told(context):
            keys, traffic = keys_of(request.keys), traffic_of(request.traffic)
            limit = request.limit_tokens or LIMIT_NONE
            return match_to_wire(self._ask(self._index.match(keys, limit, traffic), context))

    def missing(self, request: pb.MissingRequest, context: grpc.ServicerContext) -> pb.MissingReply:
        """Which grains are not stored."""
        with told(context):
            return pb.MissingReply(missing=self._ask(self._index.missing(keys_of(request.keys)), context))

    def fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchPart]:
        """Grains in order, the anchor, a summary. gRPC's flow control holds it back when the client is slow."""
        with told(context), self._bounded(context):
            keys, anchor_grain = keys_of(request.keys), request.anchor_grain
            if anchor_grain > len(keys):
                raise ObjectError(f"anchor_grain = {anchor_grain} must be at most the {len(keys)} keys given")
            cancelled = Event()
            context.add_callback(cancelled.set)
            deadline_us = self._clock_us() + int(1e6 * self._left_s(context))
            parts = self._client.fetch_parts(keys, anchor_grain, deadline_us, cancelled, self._limits.part_grains)
            grains = memory_bytes = 0
            for part in parts:
                for payload in part.grains:
                    yield from object_parts(Kind.GRAIN, grains, payload)
                    grains += 1
                memory_bytes += part.memory_bytes
                if part.anchor is not None:
                    yield from object_parts(Kind.ANCHOR, part.anchor_grain - 1, part.anchor)
            summary = pb.FetchSummary(
                grains=grains, anchor_grain=part.anchor_grain, reason=part.reason, memory_bytes=memory_bytes
            )
            yield pb.FetchPart(summary=summary)

    def put(self, parts: Iterator[bytes], context: grpc.ServicerContext) -> pb.PutReply:
        """Write the objects and say what is durable."""
        with told(context), self._bounded(context), Inbox(self._budget, self._limits.object_bytes_max) as inbox:
            objects = inbox.take(parsed(pb.PutPart, part) for part in parts)
            outcomes = self._client.save(objects)
            saved = [outcome for outcome in outcomes if isinstance(outcome, Saved)]
            failed = [outcome for outcome in outcomes if not isinstance(outcome, Saved)]
            return pb.PutReply(
                objects_saved=sum(len(outcome.record.table) for outcome in saved),
                objects_new=sum(outcome.objects_new for outcome in saved),
                objects_failed=sum(outcome.objects for outcome in failed),
                reasons=[reason for outcome in failed for reason in outcome.reasons],
            )

    def pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinReply:
        """Keep the longest stored prefix until its release or the end of its lease."""
        with told(context):
            keys, lease_us = keys_of(request.keys), lease_us_of(request.lease_ms)
            future = self._index.locate(keys, self._owner)
            try:
                located = self._ask(future, context)
            except UnavailableError:
                future.add_done_callback(self._release_late)
                raise
            lease = 0
            if located.pin:
                lease = randbits(63) | 1
                with self._lock:
                    self._leases.add(lease, located.pin, self._clock_us() + lease_us)
            anchor = max(located.anchors, default=0)
            return pb.PinReply(
                pin=lease, grains=len(located.grain_stripes), anchor_grain=anchor, boot_id=located.boot_id
            )

    def release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        """End a pin."""
        with told(context):
            with self._lock:
                pin = self._leases.release(request.pin)
            return pb.ReleaseReply(released=pin is not None and self._ask(self._index.release(pin), context))

    def stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:
        """Counts and bytes now."""
        with told(context):
            usage = self._ask(self._index.usage(), context)
            return pb.StatsReply(
                grains=usage.grains,
                anchors=usage.anchors,
                stripes=usage.stripes,
                stored_bytes=usage.stored_bytes,
                pins=len(self._leases),
                memory_bytes=self._client.memory.held_bytes,
                version=self._version,
            )

    def end_overdue(self) -> int:
        """Release pins whose lease is over and cancel streams past their deadline; how many. Called regularly.

        A client that neither reads nor writes nor set a deadline would hold its thread and memory for ever.
        """
        now_us = self._clock_us()
        with self._lock:
            pins = self._leases.ended(now_us)
            late = [context for context, end_us in self._streams.items() if end_us <= now_us]
        for pin in pins:
            self._index.release(pin)
        for context in late:
            context.cancel()
        return len(pins) + len(late)

    @contextmanager
    def _bounded(self, context: grpc.ServicerContext) -> Iterator[None]:
        """A stream that `end_overdue` ends if it takes too long."""
        with self._lock:
            self._streams[context] = self._clock_us() + int(1e6 * self._left_s(context))
        try:
            yield
        finally:
            with self._lock:
                del self._streams[context]

    def _left_s(self, context: grpc.ServicerContext) -> float:
        """Seconds until this call must end."""
        left = context.time_remaining()
        return self._limits.call_s if left is None else max(0.0, min(left, self._limits.call_s))

    def _ask(self, future: Future[T], context: grpc.ServicerContext) -> T:
        try:
            return future.result(timeout=self._left_s(context))
        except TimeoutError as error:
            raise UnavailableError("the index did not answer in time; try again") from error
        except Exception as error:  # whatever carries the call may fail in its own ways
            raise UnavailableError(f"the index cannot be asked: {type(error).__name__}: {error}; try again") from error

    def _release_late(self, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None and future.result().pin:
            self._index.release(future.result().pin)


class UnavailableError(Exception):
    """The index cannot be asked now; the message says why and what to do."""


_CODES: dict[type[Exception], grpc.StatusCode] = {
    ObjectError: grpc.StatusCode.INVALID_ARGUMENT,
    BudgetExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
}


def _parsed(
    kind: type[M], method: Callable[[M, grpc.ServicerContext], T]
) -> Callable[[bytes, grpc.ServicerContext], T]:
    """The method for a raw message."""

    def run(raw: bytes, context: grpc.ServicerContext) -> T:
        with told(context):
            request = parsed(kind, raw)
        return method(request, context)

    return run


@contextmanager
def told(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the status that says what went wrong."""
    try:
        yield
    except tuple(_CODES) as error:
        context.abort(_CODES[type(error)], str(error))
