"""Measure the store against the machine: coding against ISA-L itself, put and fetch against plain files, match time.

`python -m shoal.kvstore.bench [directory]` prints every figure with its ratio. Nothing here is a test: a ratio is
reported, never asserted.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from shoal.kvstore.client import Saved, StoreClient
from shoal.kvstore.config import CodeConfig, DeviceConfig, FsyncRule, IndexConfig, StoreConfig
from shoal.kvstore.core.chain import Namespace, chain_keys
from shoal.kvstore.core.index import StoreIndex
from shoal.kvstore.core.records import Kind, StoredObject, StripeRecord, TableEntry, TrafficClass
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.io.isal import IsalCode
from shoal.kvstore.local import LocalIndex, LocalNode
from shoal.kvstore.node import open_node
from shoal.kvstore.service import IndexService

MIB = 1 << 20
# One block of the small test model (bytes); a figure of realistic size, not a limit.
GRAIN_BYTES = 92_160
REPEATS = 6
_NAMESPACE = Namespace("bench", "1", "bench", "N1")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement; `ratio` is value / peer in the same run, 0 when there is no peer."""

    name: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float = 0.0

    @property
    def ratio(self) -> float:
        """Value over the peer's value."""
        return self.value / self.peer_value if self.peer_value else 0.0


@dataclass(frozen=True, slots=True)
class StoreBench:
    """All figures of one run, in the order measured."""

    figures: tuple[Figure, ...]

    def lines(self) -> tuple[str, ...]:
        """A table row for each figure."""
        return tuple(
            f"{f.name:<34}{f.value:>10.3f} {f.unit:<6}"
            + (f"{f.ratio:>8.2f} x {f.peer} ({f.peer_value:.3f})" if f.peer else "")
            for f in self.figures
        )


def bench_store(directory: Path, total_mib: int = 64) -> StoreBench:
    """Measure in `directory` (a scratch folder below it is removed afterwards); about 5 s and 3 x `total_mib`."""
    pure = (*coding_figures(), *chain_figures(), *match_figures(), *index_figures())
    return StoreBench((*pure, *file_figures(directory, total_mib)))


def coding_figures() -> tuple[Figure, ...]:
    """Encode and rebuild of 10+2 stripes, GB/s of data bytes, against `ec_encode_data` on ready tables and pointers."""
    code, figures = IsalCode(), []
    for mib in (1, 16):
        shard = mib * MIB // 10 // 64 * 64
        rows = np.random.default_rng(0).integers(0, 256, (10, shard), dtype=np.uint8)
        parity = np.empty((2, shard), dtype=np.uint8)
        code.encode(rows, parity)
        lost = {0: np.empty(shard, dtype=np.uint8), 5: np.empty(shard, dtype=np.uint8)}
        shards = {index: row for index, row in enumerate((*rows, *parity)) if index not in (0, 5)}
        gb = rows.nbytes / 1e9
        bare = gb / _seconds(code.bare_call(list(rows), parity, code.matrix(10, 2)[10:]))
        encode = gb / _seconds(partial(code.encode, rows, parity))
        rebuild = gb / _seconds(partial(code.rebuild, shards, lost, 2))
        assert np.array_equal(lost[5], rows[5]), "rebuilt bytes differ"
        figures.append(Figure(f"encode 10+2, {mib} MiB", encode, "GB/s", "ISA-L called directly", bare))
        figures.append(Figure(f"rebuild 2 of 10+2, {mib} MiB", rebuild, "GB/s", "ISA-L called directly", bare))
    return tuple(figures)


def chain_figures() -> tuple[Figure, ...]:
    """Chain keys of a prompt of 2^20 tokens, milliseconds, from an array and from a tuple."""
    tokens = np.random.default_rng(1).integers(0, 129_280, MIB)
    listed = tuple(tokens.tolist())
    array = _seconds(lambda: chain_keys(_NAMESPACE, tokens), 5) * 1e3
    plain = _seconds(lambda: chain_keys(_NAMESPACE, listed), 5) * 1e3
    return Figure("chain keys, 1 Mi tokens, array", array, "ms"), Figure("chain keys, 1 Mi tokens, tuple", plain, "ms")


def match_figures() -> tuple[Figure, ...]:
    """One match of a wholly stored prompt of 1,024 to 65,536 grains, microseconds."""
    figures = []
    for grains in (1_024, 8_192, 65_536):
        keys = chain_keys(_NAMESPACE, np.arange(grains * 128))
        index = StoreIndex(IndexConfig(1 << 40), "bench")
        anchor = TableEntry(Kind.ANCHOR, keys[-2], keys[-3], grains - 2, TrafficClass.CHAT, 0, 1, bytes(16))
        index.insert(_stripe(1, (*_entries(keys), anchor)), 0)
        assert index.match(keys, grains * 128, 1).anchor_grain == grains - 1
        us = _seconds(partial(index.match, keys, grains * 128, 1), 200) * 1e6
        figures.append(Figure(f"match, {grains} grains", us, "us"))
    return tuple(figures)


def index_figures(prompts: int = 1_000, grains: int = 64) -> tuple[Figure, ...]:
    """An index of many prompts: block references a second of matches in random order, and what a grain takes in memory.

    Memory is the index's own; a stripe's record (locations, object table with the keys) comes on top.
    """
    draw = np.random.default_rng(2)
    chains = [tuple(draw.bytes(16) for _ in range(grains)) for _ in range(prompts)]
    stripes = [_stripe(number, _entries(keys)) for number, keys in enumerate(chains)]
    tracemalloc.start()
    index = StoreIndex(IndexConfig(1 << 40), "bench")
    for now_us, stripe in enumerate(stripes):
        index.insert(stripe, now_us)
    per_grain = tracemalloc.get_traced_memory()[0] / (prompts * grains)
    tracemalloc.stop()
    order = [chains[at] for at in draw.permutation(prompts)]

    def match_all() -> None:
        for keys in order:
            index.match(keys, grains * 128, prompts)

    rate = prompts * grains / _seconds(match_all, 5) / 1e6
    return (
        Figure(f"match, {grains} grains of {prompts * grains}", rate, "M/s"),
        Figure("index memory, one grain", per_grain, "bytes"),
    )


def _entries(keys: Sequence[bytes]) -> tuple[TableEntry, ...]:
    parents = (bytes(16), *keys)
    return tuple(
        TableEntry(Kind.GRAIN, key, parents[at], at, TrafficClass.CHAT, 0, 1, bytes(16)) for at, key in enumerate(keys)
    )


def _stripe(number: int, table: tuple[TableEntry, ...]) -> StripeRecord:
    return StripeRecord(number.to_bytes(16), 1, 10, 2, 1, 1, 0, (None,) * 12, table)


def file_figures(directory: Path, total_mib: int) -> tuple[Figure, ...]:
    """Put and fetch through client, nodes and files in page cache, MB/s of payload, against plain files and memcpy.

    The first put and fetch get fresh memory; later ones find buffers for the whole result idle, as a serving process
    does whose results are short-lived.
    """
    root = Path(tempfile.mkdtemp(prefix="store-bench-", dir=directory))
    try:
        grains = total_mib * MIB // GRAIN_BYTES
        block = np.random.default_rng(2).bytes(grains * GRAIN_BYTES)
        mb = len(block) / 1e6
        path = root / "plain"
        write = mb / _seconds(lambda: path.write_bytes(block), 3)
        read = mb / _seconds(path.read_bytes, 3)
        source, target = np.frombuffer(block, dtype=np.uint8), np.empty(len(block), dtype=np.uint8)
        copy = mb / _seconds(lambda: np.copyto(target, source), 5)
        put_first, put, fetch_first, fetch, filling, held = _client_rates(root, block, grains)
        return (
            Figure("put, first (fresh memory)", put_first, "MB/s", "plain file write", write),
            Figure("put, page cache", put, "MB/s", "plain file write", write),
            Figure("fetch, first (fresh memory)", fetch_first, "MB/s", "memcpy", copy),
            Figure("fetch, page cache", fetch, "MB/s", "plain file read", read),
            Figure("fetch, page cache", fetch, "MB/s", "memcpy", copy),
            Figure("fetch, filling the host cache", filling, "MB/s", "memcpy", copy),
            Figure("fetch, from the host cache", held, "MB/s", "memcpy", copy),
        )
    finally:
        shutil.rmtree(root)


def _client_rates(root: Path, block: bytes, grains: int) -> tuple[float, ...]:
    devices = tuple(DeviceConfig(f"d{i}", f"n{i % 3}", str(root / f"d{i}"), 4 << 30) for i in range(12))
    config = StoreConfig(
        devices,
        IndexConfig(1 << 40),
        CodeConfig(),
        fsync=FsyncRule.NEVER,
        buffer_bytes_max=2 * len(block),
        idle_bytes_max=2 * len(block),
    )
    keys = chain_keys(_NAMESPACE, np.arange(grains * 128))
    view = memoryview(block)
    objects = [
        StoredObject(
            Kind.GRAIN, key, keys[at - 1] if at else bytes(16), at, TrafficClass.CHAT,
            view[at * GRAIN_BYTES : (at + 1) * GRAIN_BYTES],
        )
        for at, key in enumerate(keys)
    ]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        nodes = {name: LocalNode(open_node(config, name, "bench"), pool) for name in ("n0", "n1", "n2")}
        index = LocalIndex(IndexService(config.index, "bench", _clock_us))
        client = StoreClient((index, nodes), config, IsalCode(), checksums(), _clock_us, "bench")
        puts = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            put = client.put(objects)
            outcomes = (*(put if isinstance(put, tuple) else ()), *client.flush())
            puts.append(time.perf_counter() - started)
            assert all(isinstance(outcome, Saved) for outcome in outcomes), outcomes
        fetches = _fetch_times(client, keys, block)
        config = replace(config, host_cache_bytes=2 * len(block))
        cached = StoreClient((index, nodes), config, IsalCode(), checksums(), _clock_us, "bench")
        filling, *held = _fetch_times(cached, keys, block)
        assert cached.memory.hits == grains * len(held), f"{cached.memory} after {len(held)} fetches from memory"
    times = (puts[0], median(puts[1:]), fetches[0], median(fetches[1:]), filling, median(held))
    return tuple(len(block) / 1e6 / value for value in times)


def _fetch_times(client: StoreClient, keys: Sequence[bytes], block: bytes) -> list[float]:
    """Seconds of each of `REPEATS` fetches of everything; a result is dropped before the next is asked for."""
    times = []
    for turn in range(REPEATS):
        started = time.perf_counter()
        fetched = client.fetch(keys, 0, _clock_us() + 60_000_000)
        times.append(time.perf_counter() - started)
        assert len(fetched.grains) == len(keys), fetched.reason
        assert turn or b"".join(fetched.grains) == block, "fetched bytes differ"
        del fetched
    return times


def _clock_us() -> int:
    return time.time_ns() // 1_000


def _seconds(call: Callable[[], object], repeats: int = 20) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0, or 2 for a folder that is not there."""
    parser = argparse.ArgumentParser(prog="store bench", description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=Path(tempfile.gettempdir()), help="scratch folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    if not asked.directory.is_dir():
        sys.stderr.write(f"{asked.directory} is not a folder: name one to measure files in\n")
        return 2
    measured = bench_store(asked.directory)
    if asked.json:
        figures = [{**asdict(one), "ratio": one.ratio} for one in measured.figures]
        sys.stdout.write(json.dumps({"bench": "store", "figures": figures}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(measured.lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
