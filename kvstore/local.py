"""Ports to an index and nodes of this same process, over a bounded pool of threads."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
from shoal.kvstore.node import StoreNode
from shoal.kvstore.ports import DeviceUsage, Reply
from shoal.kvstore.service import IndexService

T = TypeVar("T")


class LocalNode:
    """A StoreNode as NodePort and ScanPort."""

    def __init__(self, node: StoreNode, pool: ThreadPoolExecutor) -> None:
        self._node = node
        self._pool = pool

    def append(self, device: str, head: bytes, payload: bytes | memoryview) -> Future[Reply[Location | Refused]]:
        """Write one fragment to one device of the node."""
        return self._pool.submit(self._node.append, device, head, payload)

    def read(self, location: Location) -> Future[Reply[bytes | memoryview | Erased]]:
        """Read one fragment; nothing is copied."""
        return self._pool.submit(self._node.view, location)

    def delete(self, locations: tuple[Location, ...]) -> Future[Reply[int]]:
        """Delete fragments; the number that were there."""
        return self._pool.submit(self._node.delete, locations)

    def usage(self) -> Future[Reply[tuple[DeviceUsage, ...]]]:
        """State of every device of the node."""
        return self._pool.submit(self._node.usage)

    def scan(self, device: str) -> Future[Reply[tuple[tuple[Location, bytes], ...]]]:
        """(location, head) of every fragment on one device."""
        return self._pool.submit(self._node.scan, device)


class LocalIndex:
    """An IndexService as QueryPort; calls are short, so they run in the caller's thread."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    def locate(self, keys: tuple[bytes, ...], owner: str) -> Future[Located]:
        """Pin the longest stored prefix of `keys` for `owner` and say where it lies."""
        return _done(self._service.locate(keys, owner))

    def insert(self, record: StripeRecord) -> Future[int]:
        """Offer the objects of a durable stripe; the number that are new."""
        return _done(self._service.insert(record))

    def release(self, pin: int) -> Future[bool]:
        """End a pin by completion."""
        return _done(self._service.release(pin))

    def report_lost(self, stripe_id: bytes, generation: int) -> Future[int]:
        """Forget a stripe that cannot be decoded; the number of grains forgotten."""
        return _done(self._service.report_lost(stripe_id, generation))

    def match(self, keys: tuple[bytes, ...], limit_tokens: int, traffic: TrafficClass) -> Future[Match]:
        """Longest stored prefix of `keys` and its largest anchor at or below `limit_tokens`; refreshes it."""
        return _done(self._service.match(keys, limit_tokens, traffic))

    def missing(self, keys: tuple[bytes, ...]) -> Future[tuple[bool, ...]]:
        """Per key: True when the grain is not stored."""
        return _done(self._service.missing(keys))

    def usage(self) -> Future[IndexUsage]:
        """Counts and bytes now."""
        return _done(self._service.usage())


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
