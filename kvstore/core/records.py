"""Values the store's parts exchange: objects, locations, stripe records, and the outcomes that are not successes."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Kind(IntEnum):
    """What an object's bytes are: the block of one grain, or the stored region of a slot right after it."""

    GRAIN = 1
    ANCHOR = 2


class TrafficClass(StrEnum):
    """Whose traffic saved a grain; each class has its own time to live."""

    AGENT = "agent"
    CHAT = "chat"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object to save. `key` names the grain; an anchor carries the key of the grain it follows.

    `parent` is the preceding grain's key (for grain 0: 16 zero bytes), `grain_index` counts grains from 0.
    `payload` is any contiguous bytes-like object; the store reads it until `put` or `flush` returns its stripe.
    """

    kind: Kind
    key: bytes
    parent: bytes
    grain_index: int
    traffic: TrafficClass
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Where one object lies in its stripe's data bytes; `checksum` binds key, kind and payload (16 bytes)."""

    kind: Kind
    key: bytes
    parent: bytes
    grain_index: int
    traffic: TrafficClass
    offset: int
    length: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Location:
    """A fragment on a device: record at byte `offset` of segment `segment`, `length` bytes of head and payload."""

    device: str
    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StripeRecord:
    """A durable stripe. `locations[i]` is fragment i's place, None where it was not written or not found.

    `data_bytes` counts the objects' bytes; `stored_bytes` counts all fragments as devices count them.
    """

    stripe_id: bytes
    generation: int
    data: int
    parity: int
    data_bytes: int
    stored_bytes: int
    created_us: int
    locations: tuple[Location | None, ...]
    table: tuple[TableEntry, ...]


@dataclass(frozen=True, slots=True)
class Erased:
    """A fragment that does not count: missing, torn, flipped, of another stripe or generation. Never an exception."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A write that was not taken: device full, read-only or missing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Bytes that cannot be had: too few fragments, or a payload that does not belong to its key."""

    reason: str


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt finds: `grains_matched` contiguous grains, `anchor_grain` of them usable (0: nothing usable).

    The engine resumes at `anchor_grain` * grain tokens. `boot_id` names this life of the index.
    """

    grains_matched: int
    anchor_grain: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Located:
    """A pinned prefix: `stripes` hold its grains in order of first use, `anchors` are the grain counts that have one.

    `grain_stripes[i]` and `anchor_stripes[i]` index `stripes`. `pin` is 0 when nothing matched (nothing to release).
    """

    pin: int
    grain_stripes: tuple[int, ...]
    anchors: tuple[int, ...]
    anchor_stripes: tuple[int, ...]
    stripes: tuple[StripeRecord, ...]
    boot_id: str


@dataclass(frozen=True, slots=True)
class IndexUsage:
    """Counts now; `stored_bytes` includes stripes whose deletion is not confirmed yet."""

    grains: int
    anchors: int
    stripes: int
    pins: int
    orphans: int
    stored_bytes: int
    freed_bytes: int
