"""The store for an engine outside the cluster: the same verbs and values as inside it, over gRPC."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from shoal.kvstore.client import Fetched
from shoal.kvstore.core.records import Match, StoredObject, TrafficClass
from shoal.kvstore.errors import ObjectError, StoreError
from shoal.kvstore.rpc import store_pb2 as pb
from shoal.kvstore.rpc.messages import put_parts, traffic_to_wire

SERVICE = "/shoal.store.v1.Store/"


class RemoteStoreError(StoreError):
    """The gateway did not do it: gone, too busy, a wrong token, or out of time. `status` is gRPC's name for it."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What a put made durable; `reasons` say why `failed` objects are not."""

    saved: int
    new: int
    failed: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that stays until `release(pin)` or the end of its lease. `pin` 0: nothing is stored."""

    pin: int
    grains: int
    anchor_grain: int
    boot_id: str


class RemoteStore:
    """One connection. Thread-safe. Raises ObjectError for what breaks a rule and RemoteStoreError for the rest.

    `address` is host:port; `token` one of the gateway's; `root_certificate` (PEM) turns TLS on. Every call ends after
    `timeout_s`.
    """

    def __init__(
        self, address: str, token: str = "", root_certificate: bytes | None = None, timeout_s: float = 30.0
    ) -> None:
        if root_certificate is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root_certificate))
        self._timeout_s = timeout_s
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        unary, call = self._channel.unary_unary, SERVICE
        self._match = unary(call + "Match", pb.MatchRequest.SerializeToString, pb.MatchReply.FromString)
        self._missing = unary(call + "Missing", pb.MissingRequest.SerializeToString, pb.MissingReply.FromString)
        self._pin = unary(call + "Pin", pb.PinRequest.SerializeToString, pb.PinReply.FromString)
        self._release = unary(call + "Release", pb.ReleaseRequest.SerializeToString, pb.ReleaseReply.FromString)
        self._stats = unary(call + "Stats", pb.StatsRequest.SerializeToString, pb.StatsReply.FromString)
        self._fetch = self._channel.unary_stream(
            call + "Fetch", pb.FetchRequest.SerializeToString, pb.FetchPart.FromString
        )
        self._put = self._channel.stream_unary(call + "Put", pb.PutPart.SerializeToString, pb.PutReply.FromString)

    def __enter__(self) -> "RemoteStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and what is under way on it."""
        self._channel.close()

    def match(
        self, keys: Sequence[bytes], limit_tokens: int = 0, traffic: TrafficClass = TrafficClass.DEFAULT
    ) -> Match:
        """Longest stored prefix of `keys` and its largest anchor at or below `limit_tokens` (0: no limit)."""
        request = pb.MatchRequest(keys=keys, limit_tokens=limit_tokens, traffic=traffic_to_wire(traffic))
        with _errors():
            reply = self._match(request, **self._usual())
        return Match(reply.grains_matched, reply.anchor_grain, reply.boot_id)

    def missing(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored."""
        with _errors():
            return tuple(self._missing(pb.MissingRequest(keys=keys), **self._usual()).missing)

    def put(self, objects: Sequence[StoredObject]) -> PutOutcome:
        """Store objects, predecessors first; returns when the gateway knows what is durable."""
        with _errors():
            reply = self._put(put_parts(objects), **self._usual())
        return PutOutcome(reply.objects_saved, reply.objects_new, reply.objects_failed, tuple(reply.reasons))

    def fetch(self, keys: Sequence[bytes], anchor_grain: int) -> Fetched:
        """Grains of `keys` in order until the first that cannot be had, and the anchor after `anchor_grain` grains."""
        grains: list[memoryview] = []
        anchor: memoryview | None = None
        filling = bytearray()
        with _errors():
            for part in self._fetch(pb.FetchRequest(keys=keys, anchor_grain=anchor_grain), **self._usual()):
                if part.WhichOneof("part") == "summary":
                    end = part.summary
                    return Fetched(tuple(grains), end.anchor_grain, anchor, end.reason, end.memory_bytes)
                filling += part.object.data
                if len(filling) < part.object.length:
                    continue
                whole, filling = memoryview(filling).toreadonly(), bytearray()
                if part.object.kind == pb.KIND_GRAIN:
                    grains.append(whole)
                else:
                    anchor = whole
        raise RemoteStoreError("DATA_LOSS", "the gateway ended a fetch without its summary; ask again")

    def pin(self, keys: Sequence[bytes], lease_s: float) -> Pinned:
        """Keep the longest stored prefix of `keys` for at most `lease_s` seconds (0.001 to 600)."""
        with _errors():
            reply = self._pin(pb.PinRequest(keys=keys, lease_ms=round(1000 * lease_s)), **self._usual())
        return Pinned(reply.pin, reply.grains, reply.anchor_grain, reply.boot_id)

    def release(self, pin: int) -> bool:
        """End a pin; False if it has ended already."""
        with _errors():
            return bool(self._release(pb.ReleaseRequest(pin=pin), **self._usual()).released)

    def stats(self) -> pb.StatsReply:
        """Counts and bytes of the store now."""
        with _errors():
            return self._stats(pb.StatsRequest(), **self._usual())

    def _usual(self) -> dict[str, Any]:
        return {"timeout": self._timeout_s, "metadata": self._metadata}


@contextmanager
def _errors() -> Iterator[None]:
    """gRPC's one exception as ours: what breaks a rule apart from what could work another time."""
    try:
        yield
    except grpc.RpcError as error:
        call: Any = error  # what gRPC raises is the call itself, which its types do not say
        if call.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise ObjectError(call.details()) from None
        raise RemoteStoreError(call.code().name, call.details()) from None
