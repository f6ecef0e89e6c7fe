"""Actors of the store: the index, rebuilt from the nodes whenever it starts, and nodes that own device directories."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.membership import View
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.names import NODE
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.store_ports import store_nodes
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks
from shoal.kvstore.core.records import Erased, IndexUsage, Located, Location, Match, Refused, StripeRecord, TrafficClass
from shoal.kvstore.core.stripe import Bytes
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.node import StoreNode, open_node
from shoal.kvstore.ports import DeviceUsage, Reply
from shoal.kvstore.recover import Recovered, scan_nodes
from shoal.kvstore.service import IndexService
from shoal.kvstore.upkeep import delete_fragments, sweep

log = logging.getLogger(__name__)
T = TypeVar("T")

NODES_WAIT_S = 30.0  # how long a starting index waits for nodes before it serves what it can read
SWEEP_S = 2.0
WORKERS = 8


class StoreNodeActor:
    """One storage node. Disk work runs in threads, so a slow device does not silence the node."""

    def __init__(self, spec: ClusterSpec, group: GroupRef) -> None:
        begin_logging(str(group))
        self._spec, self._group = spec, group
        self._node: StoreNode | None = None
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="device")

    async def open(self) -> None:
        """Open the node's device directories."""
        boot_id = uuid.uuid4().hex
        self._node = await self._run(lambda: open_node(self._spec.store_config(), self._group.name, boot_id))

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._node is not None

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """Nothing is in memory only: fragments are on disk when their append has been answered."""

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def append(self, device: str, head: bytes, payload: Bytes) -> Reply[Location | Refused]:
        """Write one fragment; `payload` is uint8 [shard bytes]."""
        return await self._run(lambda: self._opened().append(device, head, payload.data))

    async def read(self, location: Location) -> Reply[bytes | Erased]:
        """Read one fragment."""
        return await self._run(lambda: self._opened().read(location))

    async def delete(self, locations: tuple[Location, ...]) -> Reply[int]:
        """Delete fragments."""
        return await self._run(lambda: self._opened().delete(locations))

    async def scan(self, device: str) -> Reply[tuple[tuple[Location, bytes], ...]]:
        """Heads of every whole fragment on one device."""
        return await self._run(lambda: self._opened().scan(device))

    async def usage(self) -> Reply[tuple[DeviceUsage, ...]]:
        """State of every device."""
        return await self._run(lambda: self._opened().usage())

    def _opened(self) -> StoreNode:
        assert self._node is not None, f"{self._group} is called before open() has returned"
        return self._node

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


class IndexActor:
    """The store's index. It keeps nothing: a new life reads every fragment head and goes on."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, place: Surroundings = RAY) -> None:
        begin_logging(str(group))
        self._spec, self._group = spec, group
        self._config = spec.store_config()
        self._directory = place.members(spec.name, self._on_view)
        self._nodes = store_nodes(spec, self._directory)
        self._service: IndexService | None = None
        self._tasks = Tasks()
        self._alive: frozenset[GroupRef] = frozenset()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="index")
        self.recovered_stripes = 0

    async def open(self) -> None:
        """Wait for the nodes, rebuild, begin upkeep."""
        self._tasks.spawn(self._directory.follow())
        try:
            async with asyncio.timeout(NODES_WAIT_S):
                while len(self._directory.view.ready(NODE)) < len(self._nodes):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("only %d of %d store nodes are ready", len(self._directory.view.ready(NODE)), len(self._nodes))
        service = IndexService(self._config.index, uuid.uuid4().hex, now_us)
        await self._rebuild(service)
        self._service = service
        self._tasks.spawn(self._sweep_forever(service))

    async def _rebuild(self, service: IndexService) -> None:
        recovered: Recovered = await self._run(
            lambda: scan_nodes(self._nodes.scans(), self._config, checksums(), now_us(), int(NODES_WAIT_S * 1e6))
        )
        for record in recovered.stripes:
            service.insert(record)
        self.recovered_stripes = len(recovered.stripes)
        for reason in recovered.unreadable:
            log.warning("not scanned: %s", reason)
        if recovered.garbage:
            await self._run(lambda: delete_fragments(recovered.garbage, self._nodes, self._config))
        log.info("index holds %d stripes found on the devices", len(recovered.stripes))

    async def ping(self) -> bool:
        """Whether this life is up."""
        return self._service is not None

    async def lifeline(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def drain(self) -> None:
        """A new life rebuilds everything: there is nothing to wait for."""

    def close(self) -> None:
        """End everything this life runs, where no process ends with it."""
        self._tasks.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def match(self, keys: tuple[bytes, ...], limit_tokens: int, traffic: str) -> Match:
        """Longest stored prefix and its largest anchor at or below `limit_tokens`."""
        return self._opened().match(keys, limit_tokens, TrafficClass(traffic))

    async def missing(self, keys: tuple[bytes, ...]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored."""
        return self._opened().missing(keys)

    async def locate(self, keys: tuple[bytes, ...], owner: str, hold_us: int) -> Located:
        """Pin the longest stored prefix for `owner`, at most `hold_us`, and say where it lies."""
        return self._opened().locate(keys, owner, hold_us)

    async def release(self, pin: int) -> bool:
        """End a pin."""
        return self._opened().release(pin)

    async def insert(self, record: StripeRecord) -> int:
        """Offer the objects of a durable stripe."""
        return self._opened().insert(record)

    async def report_lost(self, stripe_id: bytes, generation: int) -> int:
        """Forget a stripe that cannot be decoded."""
        return self._opened().report_lost(stripe_id, generation)

    async def usage(self) -> IndexUsage:
        """Counts and bytes now."""
        return self._opened().usage()

    def _opened(self) -> IndexService:
        assert self._service is not None, f"{self._group} is called before open() has returned"
        return self._service

    def _on_view(self, view: View) -> None:
        """Pins of a process that is gone end with it: no read of its can be under way."""
        alive = frozenset(view.alive())
        for lost in self._alive - alive:
            if self._service is not None:
                self._service.release_owner(str(lost))
        self._alive = alive

    async def _sweep_forever(self, service: IndexService) -> None:
        gone: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(SWEEP_S)
            # A call of a dead engine may be carried out after its loss was seen: whoever is not alive at two rounds
            # in a row is let go (once might be an engine that this view does not know yet).
            absent = service.owners() - frozenset(map(str, self._alive))
            for owner in absent & gone:
                service.release_owner(owner)
            gone = absent
            swept: Any = await self._run(lambda: sweep(service, self._nodes, self._config))
            for reason in swept.reasons:
                log.warning("upkeep: %s", reason)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)
