"""What the store asks of the world: devices, nodes and the index."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shoal.kvstore.core.records import (
    Erased,
    IndexUsage,
    Located,
    Location,
    Match,
    Refused,
    StripeRecord,
    TrafficClass,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """What a device holds. `state` is "ok", "full", "read-only" or "missing"; only "ok" takes writes."""

    device: str
    state: str
    stored_bytes: int
    capacity_bytes: int
    fragments: int


class Device(Protocol):
    """One failure unit that keeps fragments; the directory and the in-memory device pass one contract suite."""

    def append(self, head: bytes, payload: bytes | memoryview) -> Location | Refused:
        """Write one fragment; when it returns a Location the fsync rule has been kept."""

    def read(self, location: Location) -> memoryview | Erased:
        """Head and payload of the fragment at `location`, checksums verified; read-only."""

    def delete(self, location: Location) -> bool:
        """Give the fragment's space back; False if it was not there (deleting twice is harmless)."""

    def scan(self) -> Iterator[tuple[Location, bytes]]:
        """(location, head) of every fragment that is whole, payloads not read."""

    @property
    def usage(self) -> DeviceUsage:
        """Bytes, cap and state now."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A node's answer; `boot_id` changes at every start of the node, so a restart is seen at once."""

    boot_id: str
    value: T


class NodePort(Protocol):
    """A storage node as a client reaches it; futures may fail with any exception when the node is gone."""

    def append(self, device: str, head: bytes, payload: bytes | memoryview) -> Future[Reply[Location | Refused]]:
        """Write one fragment to one device of the node."""

    def read(self, location: Location) -> Future[Reply[bytes | memoryview | Erased]]:
        """Read one fragment; the node has verified its checksums."""

    def delete(self, locations: tuple[Location, ...]) -> Future[Reply[int]]:
        """Delete fragments; the number that were there."""

    def usage(self) -> Future[Reply[tuple[DeviceUsage, ...]]]:
        """State of every device of the node."""


class ScanPort(Protocol):
    """A storage node as recovery reaches it."""

    def scan(self, device: str) -> Future[Reply[tuple[tuple[Location, bytes], ...]]]:
        """(location, head) of every fragment on one device."""


class IndexPort(Protocol):
    """The index as a client reaches it."""

    def locate(self, keys: tuple[bytes, ...], owner: str) -> Future[Located]:
        """Pin the longest stored prefix of `keys` for `owner` and say where it lies."""

    def insert(self, record: StripeRecord) -> Future[int]:
        """Offer the objects of a durable stripe; the number that are new."""

    def release(self, pin: int) -> Future[bool]:
        """End a pin by completion."""

    def report_lost(self, stripe_id: bytes, generation: int) -> Future[int]:
        """Forget a stripe that cannot be decoded, and every grain behind its grains; the number forgotten."""


class QueryPort(IndexPort, Protocol):
    """The index as a gateway for clients outside reaches it."""

    def match(self, keys: tuple[bytes, ...], limit_tokens: int, traffic: TrafficClass) -> Future[Match]:
        """Longest stored prefix of `keys` and its largest anchor at or below `limit_tokens`; refreshes it."""

    def missing(self, keys: tuple[bytes, ...]) -> Future[tuple[bool, ...]]:
        """Per key: True when the grain is not stored."""

    def usage(self) -> Future[IndexUsage]:
        """Counts and bytes now."""


def failure_of(future: Future[T]) -> str | None:
    """Why a finished future has no result, or None; a cancelled one says so instead of raising."""
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {error}"
