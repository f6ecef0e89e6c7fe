"""The store's index and nodes as its client wants them: futures, over Ray actors found in the directory.

A member that is not there answers with a future that has failed already: the client counts it as unavailable.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from ray.exceptions import RayError
from shoal.balancers.reports import GroupRef
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.names import COMPLETION, INDEX, NODE, role_of
from shoal.cluster.live.saver import MissingPort
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import Members
from shoal.kvstore.client import StoreClient
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
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.io.isal import IsalCode
from shoal.kvstore.ports import DeviceUsage, NodePort, Reply

MISSING_S = 1.0


class MemberGoneError(Exception):
    """The store's index or a node is not in the cluster at the moment."""


def _call(handle: Any | None, method: str, *args: Any) -> Future[Any]:
    if handle is None:
        gone: Future[Any] = Future()
        gone.set_exception(MemberGoneError(f"{method}: no such member is ready"))
        return gone
    future: Future[Any] = getattr(handle, method).remote(*args).future()
    return future


class RayNode:
    """One storage node by the number in its member name; each call finds its current life."""

    def __init__(self, directory: Members, name: str) -> None:
        self._directory = directory
        self._name = name

    def _handle(self) -> Any | None:
        for group in self._directory.view.ready(NODE):
            if group.name == self._name:
                return self._directory.handle(group)
        return None

    def append(self, device: str, head: bytes, payload: bytes | memoryview) -> Future[Reply[Location | Refused]]:
        """Write one fragment to one device of the node. Travels as an array, which Ray takes without a copy of ours."""
        return _call(self._handle(), "append", device, head, np.frombuffer(payload, dtype=np.uint8))

    def read(self, location: Location) -> Future[Reply[bytes | memoryview | Erased]]:
        """Read one fragment."""
        return _call(self._handle(), "read", location)

    def delete(self, locations: tuple[Location, ...]) -> Future[Reply[int]]:
        """Delete fragments; the number that were there."""
        return _call(self._handle(), "delete", locations)

    def usage(self) -> Future[Reply[tuple[DeviceUsage, ...]]]:
        """State of every device of the node."""
        return _call(self._handle(), "usage")

    def scan(self, device: str) -> Future[Reply[tuple[tuple[Location, bytes], ...]]]:
        """(location, head) of every fragment on one device."""
        return _call(self._handle(), "scan", device)


class RayNodes(Mapping[str, NodePort]):
    """All storage nodes of a cluster by member name, whether they live now or not."""

    def __init__(self, directory: Members, names: tuple[str, ...]) -> None:
        self._nodes = {name: RayNode(directory, name) for name in names}

    def __getitem__(self, name: str) -> RayNode:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def scans(self) -> Mapping[str, RayNode]:
        """The same nodes as recovery wants them."""
        return self._nodes


class RayIndex:
    """The store's index, whichever life it is in."""

    def __init__(self, directory: Members) -> None:
        self._directory = directory

    def locate(self, keys: tuple[bytes, ...], owner: str) -> Future[Located]:
        """Pin the longest stored prefix of `keys` for `owner` and say where it lies."""
        return _call(self._directory.only(INDEX), "locate", keys, owner)

    def insert(self, record: StripeRecord) -> Future[int]:
        """Offer the objects of a durable stripe; the number that are new."""
        return _call(self._directory.only(INDEX), "insert", record)

    def release(self, pin: int) -> Future[bool]:
        """End a pin by completion."""
        return _call(self._directory.only(INDEX), "release", pin)

    def report_lost(self, stripe_id: bytes, generation: int) -> Future[int]:
        """Forget a stripe that cannot be decoded; the number of grains forgotten."""
        return _call(self._directory.only(INDEX), "report_lost", stripe_id, generation)

    def missing(self, keys: tuple[bytes, ...]) -> Future[tuple[bool, ...]]:
        """Per key: True when the grain is not stored."""
        return _call(self._directory.only(INDEX), "missing", keys)

    def match(self, keys: tuple[bytes, ...], limit_tokens: int, traffic: TrafficClass) -> Future[Match]:
        """Longest stored prefix of `keys` and its largest anchor at or below `limit_tokens`; refreshes it."""
        return _call(self._directory.only(INDEX), "match", keys, limit_tokens, str(traffic))

    def usage(self) -> Future[IndexUsage]:
        """Counts and bytes now."""
        return _call(self._directory.only(INDEX), "usage")


def store_client(spec: ClusterSpec, directory: Members, group: GroupRef) -> tuple[StoreClient, MissingPort]:
    """A client of this engine group over this cluster's store, and the question which grains it lacks.

    The host cache lies in the group's own process. A COMPLETION group only saves, so it has none.
    """
    config = spec.store_config()
    if role_of(group) == COMPLETION:
        config = replace(config, host_cache_bytes=0)
    index = RayIndex(directory)
    client = StoreClient((index, store_nodes(spec, directory)), config, IsalCode(), checksums(), now_us, str(group))

    def missing(keys: tuple[bytes, ...]) -> tuple[bool, ...]:
        future = index.missing(keys)
        try:
            answer: tuple[bool, ...] = future.result(timeout=MISSING_S)
        except (RayError, TimeoutError, MemberGoneError):
            return (True,) * len(keys)
        return answer

    return client, missing


def store_nodes(spec: ClusterSpec, directory: Members) -> RayNodes:
    """All nodes of this cluster's store."""
    return RayNodes(directory, tuple(dict.fromkeys(device.node for device in spec.store_config().devices)))
