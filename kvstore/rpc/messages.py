"""Wire values to the store's own and back: every field of a stranger's message is checked here, by name.

A message that breaks a rule raises ObjectError; its text names field, value, rule and remedy and is what the client
is told.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from shoal.kvstore.core.chain import KEY_BYTES
from shoal.kvstore.core.records import Kind, Match, StoredObject, TrafficClass
from shoal.kvstore.errors import ObjectError
from shoal.kvstore.rpc import store_pb2 as pb

M = TypeVar("M", bound=Message)

PART_BYTES = 1 << 20  # of an object in one message: far below gRPC's limit of 4 MiB, far above its cost of a message
KEYS_MAX = 65_536  # 8 M tokens of 128-token grains: 1 MiB of keys
LEASE_MS_MAX = 600_000

_TRAFFIC: dict[int, TrafficClass] = {
    pb.TRAFFIC_DEFAULT: TrafficClass.DEFAULT,
    pb.TRAFFIC_AGENT: TrafficClass.AGENT,
    pb.TRAFFIC_CHAT: TrafficClass.CHAT,
}
_WIRE_TRAFFIC: dict[TrafficClass, pb.Traffic] = {
    TrafficClass.DEFAULT: pb.TRAFFIC_DEFAULT,
    TrafficClass.AGENT: pb.TRAFFIC_AGENT,
    TrafficClass.CHAT: pb.TRAFFIC_CHAT,
}
_WIRE_KIND: dict[Kind, pb.Kind] = {Kind.GRAIN: pb.KIND_GRAIN, Kind.ANCHOR: pb.KIND_ANCHOR}


def keys_of(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The chain keys of a request, in order; ObjectError."""
    if not keys:
        raise ObjectError("keys is empty; give the chain keys of the prompt's full grains, grain 0 first")
    if len(keys) > KEYS_MAX:
        raise ObjectError(f"keys has {len(keys)} entries, more than {KEYS_MAX}; ask in several calls")
    for index, key in enumerate(keys):
        _key(f"keys[{index}]", key)
    return tuple(keys)


def traffic_of(value: int, field: str = "traffic") -> TrafficClass:
    """The traffic class; ObjectError for a number of a later version."""
    if value not in _TRAFFIC:
        raise ObjectError(f"{field} = {value} is not known here; use TRAFFIC_DEFAULT, TRAFFIC_AGENT or TRAFFIC_CHAT")
    return _TRAFFIC[value]


def lease_us_of(lease_ms: int) -> int:
    """A pin's lease in microseconds; ObjectError."""
    if not 1 <= lease_ms <= LEASE_MS_MAX:
        raise ObjectError(f"lease_ms = {lease_ms} must lie in 1 to {LEASE_MS_MAX}; pin again before it ends")
    return 1000 * lease_ms


def parsed(kind: type[M], raw: bytes) -> M:
    """A message; ObjectError."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise ObjectError(f"{len(raw)} bytes are no {kind.__name__}: {error}; see store.proto") from error


def head_of(head: pb.ObjectHead, at: int, object_bytes_max: int) -> tuple[StoredObject, int]:
    """Object `at` of a put, without its payload, and the payload's length; ObjectError."""
    where = f"object {at}: "
    kinds = {pb.KIND_GRAIN: Kind.GRAIN, pb.KIND_ANCHOR: Kind.ANCHOR}
    if head.kind not in kinds:
        raise ObjectError(f"{where}kind = {head.kind} must be KIND_GRAIN or KIND_ANCHOR")
    _key(f"{where}key", head.key)
    _key(f"{where}parent", head.parent)
    if (head.grain_index == 0) != (head.parent == bytes(KEY_BYTES)):
        raise ObjectError(
            f"{where}parent = {head.parent.hex()} does not fit grain_index = {head.grain_index}; grain 0 has 16 zero "
            "bytes, every other the key of the grain before it"
        )
    if not 1 <= head.length <= object_bytes_max:
        raise ObjectError(f"{where}length = {head.length} must lie in 1 to {object_bytes_max} bytes")
    traffic = traffic_of(head.traffic, f"{where}traffic")
    return StoredObject(kinds[head.kind], head.key, head.parent, head.grain_index, traffic, b""), head.length


def head_to_wire(item: StoredObject) -> pb.ObjectHead:
    """What precedes an object's bytes in a put."""
    return pb.ObjectHead(
        kind=_WIRE_KIND[item.kind],
        key=item.key,
        parent=item.parent,
        grain_index=item.grain_index,
        traffic=_WIRE_TRAFFIC[item.traffic],
        length=memoryview(item.payload).nbytes,
    )


def traffic_to_wire(traffic: TrafficClass) -> pb.Traffic:
    """The wire's number of a traffic class."""
    return _WIRE_TRAFFIC[traffic]


def match_to_wire(match: Match) -> pb.MatchReply:
    """What a prompt finds."""
    return pb.MatchReply(grains_matched=match.grains_matched, anchor_grain=match.anchor_grain, boot_id=match.boot_id)


def put_parts(objects: Iterable[StoredObject]) -> Iterator[pb.PutPart]:
    """A put's messages: each object's head with its first bytes, then the rest of it."""
    for item in objects:
        view = memoryview(item.payload).cast("B")
        yield pb.PutPart(head=head_to_wire(item), data=bytes(view[:PART_BYTES]))
        for offset in range(PART_BYTES, view.nbytes, PART_BYTES):
            yield pb.PutPart(data=bytes(view[offset : offset + PART_BYTES]))


def object_parts(kind: Kind, grain_index: int, payload: memoryview) -> Iterator[pb.FetchPart]:
    """A fetched object's messages."""
    view = payload.cast("B")
    for offset in range(0, view.nbytes, PART_BYTES):
        part = pb.ObjectPart(
            kind=_WIRE_KIND[kind],
            grain_index=grain_index,
            length=view.nbytes,
            offset=offset,
            data=bytes(view[offset : offset + PART_BYTES]),
        )
        yield pb.FetchPart(object=part)


def _key(field: str, key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ObjectError(f"{field} has {len(key)} bytes, must have {KEY_BYTES}: a chain key")
