"""SIGKILL of a writing process at each fail point, on real files: what was acknowledged is there, nothing is wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_world import World, assert_right, prompt, prompt_objects

HERE = Path(__file__).resolve().parent
# Runs in a process of its own: writes prompts, names each one acknowledged, kills itself at the nth visit of a point.
WRITER = """
import os, signal, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from store_world import World, prompt, prompt_objects
from shoal.kvstore.config import IndexConfig
from shoal.kvstore.upkeep import sweep

point, visits, capacity = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
world = World(Path(sys.argv[3]), index=IndexConfig(capacity_bytes=capacity))

def fail(name):
    global visits
    if name == point:
        visits -= 1
        if visits == 0:
            os.kill(os.getpid(), signal.SIGKILL)

for node in world.nodes.values():
    for device in node._node._devices.values():
        device._fail_point = fail
for seed in range(40):
    world.save(prompt_objects(prompt(8, seed), anchors=(8,)))
    world.clock.us += 1000
    print(seed, flush=True)
    sweep(world.index, world.nodes, world.config)
print("survived", flush=True)
"""


def killed_writer(root: Path, point: str, visits: int, capacity: int) -> list[int]:
    """Prompts acknowledged before the kill."""
    arguments = [sys.executable, "-c", WRITER, str(HERE.parent.parent), str(HERE), str(root), point, str(visits)]
    done = subprocess.run([*arguments, str(capacity)], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr + done.stdout
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("point", "visits"),
    [("append:before", 40), ("append:torn", 41), ("append:torn", 60), ("append:unsynced", 66), ("append:done", 85)],
)
def test_a_writer_killed_while_appending_loses_nothing_acknowledged(tmp_path, point, visits):
    acknowledged = killed_writer(tmp_path, point, visits, 1 << 30)
    assert acknowledged
    world = World(tmp_path)
    for seed in range(40):
        keys = prompt(8, seed)
        match = world.index.match(keys, 8 * 128)
        fetched = world.fetch(keys[: match.grains_matched], match.anchor_grain)
        assert_right(fetched, keys)
        assert len(fetched.grains) == match.grains_matched
        if seed in acknowledged:
            assert (match.grains_matched, match.anchor_grain) == (8, 8)
    later = prompt(8, 99)
    world.save(prompt_objects(later, anchors=(8,)))
    assert_right(world.fetch(later, 8), later)
    world.close()


@pytest.mark.parametrize(("point", "visits"), [("delete:before", 1), ("delete:before", 20), ("delete:after", 30)])
def test_a_writer_killed_while_deleting_leaves_no_wrong_bytes_and_no_leak(tmp_path, point, visits):
    acknowledged = killed_writer(tmp_path, point, visits, 1 << 20)
    world = World(tmp_path)
    kept = 0
    for seed in acknowledged:
        keys = prompt(8, seed)
        fetched = world.fetch(keys, 8)
        assert_right(fetched, keys)
        kept += fetched.anchor_grain == 8
    assert kept >= 3
    world.clock.us += 60_000_000
    world.start()  # what was half deleted is old enough now to be called garbage
    held = {place for record in world.recovered.stripes for place in record.locations if place is not None}
    scanned = {
        place
        for node in world.nodes.values()
        for name in world.root.iterdir()
        for place, _ in node.scan(name.name).result().value
    }
    assert scanned == held | set(world.recovered.garbage) | set(world.recovered.unknown)
    assert not world.recovered.unknown
    world.close()
