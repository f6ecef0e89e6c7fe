"""Measure a hand-off's transfer: 256 blocks and a slot, against one raw NIXL piece of as many bytes and memcpy.

Run `python -m shoal.cluster.live.transfer_bench`; figures are medians of one run, so that their ratios mean something.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from shoal.cluster.core.handoff import Kind
from shoal.cluster.core.transfer_plan import Pieces, kind_spans, unit_spans
from shoal.cluster.live.transfer import NixlTransfer
from shoal.cluster.transfer import Done, KindDigest

BLOCK_BYTES = 92_160
SLOT_BYTES = 977_856
BLOCK_COUNT = 256
POOL_BLOCKS = 1024
REPEATS = 15
PEER_START_S = 60.0
WRITE_S = 30.0


def measure() -> dict[str, float]:
    """Milliseconds and GB/s of each way, and the hand-off's ratios to raw NIXL and memcpy."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=_serve, args=(theirs,), daemon=True)
    peer.start()
    transfer, (blocks, slots) = _open("bench-source-1")
    try:
        if not pipe.poll(PEER_START_S):
            raise TimeoutError(f"the peer process did not start within {PEER_START_S} s")
        transfer.add_peer("bench-target-1", pipe.recv())
        times = _times(transfer, blocks, slots)
    finally:
        pipe.send("stop")
        peer.join(PEER_START_S)
        transfer.close()
    return _figures(times)


def _open(name: str) -> tuple[NixlTransfer, tuple[Any, Any]]:
    transfer = NixlTransfer(name)
    blocks = np.ones(POOL_BLOCKS * BLOCK_BYTES, np.uint8)
    slots = np.ones(8 * SLOT_BYTES, np.uint8)
    transfer.register("blocks", blocks)
    transfer.register("slots", slots)
    return transfer, (blocks, slots)


def _serve(pipe: Any) -> None:
    transfer, _ = _open("bench-target-1")
    pipe.send(transfer.metadata())
    pipe.recv()
    transfer.close()


def _times(transfer: NixlTransfer, blocks: Any, slots: Any) -> dict[str, float]:
    rng = np.random.default_rng(1)
    scattered = [rng.permutation(POOL_BLOCKS)[:BLOCK_COUNT].tolist() for _ in range(2)]
    slot = Pieces("slots", "slots", unit_spans([1], [2], SLOT_BYTES))
    total = BLOCK_COUNT * BLOCK_BYTES + SLOT_BYTES
    raw = Pieces("blocks", "blocks", np.array([[0, 0, total]], np.int64))
    runs = range(BLOCK_COUNT)
    ways: dict[str, tuple[Pieces, ...]] = {
        "handoff": (Pieces("blocks", "blocks", unit_spans(scattered[0], scattered[1], BLOCK_BYTES)), slot),
        "handoff_runs": (Pieces("blocks", "blocks", unit_spans(runs, runs, BLOCK_BYTES)), slot),
        "raw_nixl": (raw,),
    }
    copy_to = np.empty(total, np.uint8)
    spans = kind_spans([(0, BLOCK_BYTES)], scattered[0], BLOCK_BYTES)
    calls: dict[str, Callable[[], None]] = {name: _writer(transfer, pieces) for name, pieces in ways.items()}
    calls["memcpy"] = lambda: np.copyto(copy_to, blocks[:total])
    calls["checksum"] = lambda: KindDigest(Kind.MAIN).update(blocks, spans)
    # Interleaved, so that a busy moment of the machine hits all ways alike.
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seen[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[2:]) for name, times in seen.items()}


def _writer(transfer: NixlTransfer, pieces: tuple[Pieces, ...]) -> Callable[[], None]:
    def write() -> None:
        state = transfer.write("bench-target-1", pieces, b"x").wait(WRITE_S)
        if state != Done():
            raise RuntimeError(f"a benchmark write ended as {state}")

    return write


def _figures(times: dict[str, float]) -> dict[str, float]:
    total = BLOCK_COUNT * BLOCK_BYTES + SLOT_BYTES
    figures = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in times.items()}
    figures |= {f"{name}_gb_s": round(total / seconds / 1e9, 2) for name, seconds in times.items()}
    figures["handoff_to_raw_nixl"] = round(times["raw_nixl"] / times["handoff"], 3)
    figures["handoff_to_memcpy"] = round(times["memcpy"] / times["handoff"], 3)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Print the figures, a line each or as JSON; exit status 0."""
    parser = argparse.ArgumentParser(prog="transfer bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    # NIXL logs to standard output, where the figures go; it reads this when it is first imported, here and in the peer.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    figures = measure()
    lines = json.dumps(figures, indent=1) if asked.json else "\n".join(f"{k:<24}{v:>10}" for k, v in figures.items())
    sys.stdout.write(lines + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
