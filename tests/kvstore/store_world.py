"""A whole store in one process for tests: directories, nodes, index, client, and faults on demand."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from shoal.kvstore.client import Saved, StoreClient
from shoal.kvstore.config import DeviceConfig, FsyncRule, IndexConfig, StoreConfig
from shoal.kvstore.core.chain import Namespace, chain_keys
from shoal.kvstore.core.records import Erased, Kind, StoredObject, TrafficClass
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.io.isal import IsalCode
from shoal.kvstore.local import LocalIndex, LocalNode
from shoal.kvstore.node import open_node
from shoal.kvstore.ports import Reply
from shoal.kvstore.recover import scan_nodes
from shoal.kvstore.service import IndexService

NAMESPACE = Namespace("toy", "r1", "v41-blocks-1", "N1")
GRAIN_BYTES, ANCHOR_BYTES = 9_216, 42_451


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self) -> int:
        return self.us


class RunningClock(Clock):
    """Each look costs 5 ms, so that deadlines and slowness come without being waited for."""

    def __call__(self) -> int:
        self.us += 5_000
        return self.us


class FaultyNode(LocalNode):
    """A node whose reads can be held back or made to fail, by device."""

    def __init__(self, node, pool) -> None:
        super().__init__(node, pool)
        self.held: dict[str, list[Future]] = {}
        self.broken: set[str] = set()
        self.reads: list[str] = []

    def read(self, location):
        self.reads.append(location.device)
        if location.device in self.broken:
            future: Future = Future()
            future.set_exception(ConnectionError(f"{location.device} is gone"))
            return future
        if location.device in self.held:
            future = Future()
            self.held[location.device].append(future)
            return future
        return super().read(location)


def store_config(root: Path, devices: int = 12, nodes: int = 4, **changes) -> StoreConfig:
    listed = tuple(
        DeviceConfig(f"d{i:02d}", f"n{i % nodes}", str(root / f"d{i:02d}"), 64 << 20) for i in range(devices)
    )
    usual = {
        "index": IndexConfig(capacity_bytes=1 << 30),
        "stripe_bytes": 96 << 10,
        "fsync": FsyncRule.NEVER,
        "slow_us": 50_000,
    }
    return StoreConfig(devices=listed, **{**usual, **changes})


class World:
    def __init__(self, root: Path, clock: Clock | None = None, **changes) -> None:
        self.root = root
        self.config = store_config(root, **changes)
        self.clock = clock or Clock()
        self.pool = ThreadPoolExecutor(16)
        self.sums = checksums()
        self.boots = 0
        self.start()

    def start(self) -> None:
        """Start, or start again after a stop: new boot ids, the index rebuilt from what the devices hold."""
        self.boots += 1
        boot = f"boot{self.boots}"
        names = sorted({device.node for device in self.config.devices})
        self.nodes = {name: FaultyNode(open_node(self.config, name, boot), self.pool) for name in names}
        self.index = IndexService(self.config.index, boot, self.clock)
        self.recovered = scan_nodes(self.nodes, self.config, self.sums, self.clock(), 10_000_000)
        for record in self.recovered.stripes:
            self.index.insert(record)
        self.restart_client()

    def restart_client(self, **changes) -> None:
        """A new client process: nothing buffered, nothing in memory."""
        config = replace(self.config, **changes)
        self.client = StoreClient(
            (LocalIndex(self.index), self.nodes), config, IsalCode(), self.sums, self.clock, "test"
        )

    def node_of(self, device: str) -> FaultyNode:
        return self.nodes[next(d.node for d in self.config.devices if d.name == device)]

    def lose_directory(self, device: str) -> None:
        shutil.rmtree(self.root / device)

    def save(self, objects) -> list[Saved]:
        outcomes = [*self.client.put(objects), *self.client.flush()]
        assert all(isinstance(outcome, Saved) for outcome in outcomes), outcomes
        return outcomes

    def fetch(self, keys, anchor_grain: int, wait_us: int = 5_000_000, cancelled=None):
        return self.client.fetch(keys, anchor_grain, self.clock() + wait_us, cancelled)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def prompt(grains: int, seed: int = 0) -> tuple[bytes, ...]:
    tokens = np.random.default_rng(seed).integers(0, 129_280, grains * 128)
    return chain_keys(NAMESPACE, tokens)


def payload(key: bytes, kind: Kind, size: int) -> bytes:
    return np.random.default_rng([int.from_bytes(key), kind]).bytes(size)


def prompt_objects(keys, anchors=(), first: int = 0, traffic: TrafficClass = TrafficClass.CHAT) -> list[StoredObject]:
    """Objects of grains `first`.. of a prompt, with an anchor after each grain count in `anchors`."""
    objects = []
    for index in range(first, len(keys)):
        parent = keys[index - 1] if index else bytes(16)
        grain = payload(keys[index], Kind.GRAIN, GRAIN_BYTES)
        objects.append(StoredObject(Kind.GRAIN, keys[index], parent, index, traffic, grain))
        if index + 1 in anchors:
            anchor = payload(keys[index], Kind.ANCHOR, ANCHOR_BYTES)
            objects.append(StoredObject(Kind.ANCHOR, keys[index], parent, index, traffic, anchor))
    return objects


def assert_right(fetched, keys) -> None:
    """Every byte that came out is the one that was put in under its key."""
    for key, got in zip(keys, fetched.grains, strict=False):
        assert bytes(got) == payload(key, Kind.GRAIN, GRAIN_BYTES)
    if fetched.anchor_grain:
        assert bytes(fetched.anchor) == payload(keys[fetched.anchor_grain - 1], Kind.ANCHOR, ANCHOR_BYTES)
    else:
        assert fetched.anchor is None


def erased(reason: str) -> Reply:
    return Reply("boot", Erased(reason))
