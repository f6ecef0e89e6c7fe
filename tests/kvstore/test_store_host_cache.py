"""The host cache: bounded by bytes, read before the devices, and never a way around verification."""

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.lru import ByteLru, leading
from shoal.kvstore.core.records import Kind
from shoal.kvstore.host_cache import HostCache
from shoal.kvstore.upkeep import sweep
from shoal.kvstore.write import WriteFailed
from store_world import ANCHOR_BYTES, GRAIN_BYTES, World, assert_right, payload, prompt, prompt_objects, store_config

PROMPT_BYTES = 12 * GRAIN_BYTES + ANCHOR_BYTES


def new_client(world: World, cache_bytes: int):
    """A client like one just started: nothing in memory."""
    world.restart_client(host_cache_bytes=cache_bytes)
    return world.client


def reads(world: World) -> int:
    count = sum(len(node.reads) for node in world.nodes.values())
    for node in world.nodes.values():
        node.reads.clear()
    return count


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, host_cache_bytes=1 << 20)
    yield made
    made.close()


operations = st.lists(st.tuples(st.sampled_from(["put", "touch"]), st.integers(0, 9), st.integers(1, 60)), max_size=80)


@given(operations, st.integers(0, 100))
def test_the_lru_does_what_a_list_does(steps, capacity):
    lru, model = ByteLru(capacity), []  # model: (key, value), oldest first
    for what, key, size in steps:
        found = [item for item in model if item[0] == key]
        if what == "touch":
            assert lru.touch(key) == bool(found)
            model = [item for item in model if item[0] != key] + found
        else:
            value = bytes((size,)) * size
            lru.put(key, value)
            if size <= capacity:
                model = [item for item in model if item[0] != key] + [(key, value)]
                while sum(len(value) for _, value in model) > capacity:
                    model.pop(0)
        assert {key: lru.peek(key) for key in range(10)} == {key: dict(model).get(key) for key in range(10)}
        assert (lru.held_bytes, len(lru)) == (sum(len(value) for _, value in model), len(model))
        assert lru.held_bytes <= capacity


def test_the_leading_part_is_what_fits_together():
    assert [leading([3, 3, 3], size) for size in (0, 2, 3, 8, 9, 99)] == [0, 0, 1, 2, 3, 3]


def test_what_was_fetched_is_not_read_again(world):
    keys = prompt(12)
    world.save(prompt_objects(keys, anchors=(12,)))
    new_client(world, 1 << 20)
    cold, warm = world.fetch(keys, 12), world.fetch(keys, 12)
    assert reads(world) == 11 * len(world.index.locate(keys, "x", 1_000).stripes)
    assert (cold.memory_bytes, warm.memory_bytes) == (0, PROMPT_BYTES)
    assert (warm.grains, warm.anchor, warm.anchor_grain, warm.reason) == (cold.grains, cold.anchor, 12, "")
    assert_right(warm, keys)
    usage = world.client.memory
    assert (usage.held_bytes, usage.objects, usage.hits, usage.hit_bytes) == (PROMPT_BYTES, 13, 13, PROMPT_BYTES)


def test_what_was_saved_is_not_read_at_all_and_pins_are_released(world):
    keys = prompt(12)
    world.save(prompt_objects(keys, anchors=(12,)))
    fetched = world.fetch(keys, 12)
    assert (fetched.memory_bytes, fetched.anchor_grain, reads(world)) == (PROMPT_BYTES, 12, 0)
    assert_right(fetched, keys)
    assert world.index.usage().pins == 0


def test_off_reads_every_time(tmp_path):
    world = World(tmp_path, host_cache_bytes=0)
    keys = prompt(4)
    world.save(prompt_objects(keys))
    assert world.fetch(keys, 0).memory_bytes == world.fetch(keys, 0).memory_bytes == 0
    assert reads(world) >= 20
    assert world.client.memory.objects == 0
    world.close()


def test_only_the_missing_part_is_read(world):
    """Another prompt shares a prefix: its stripes are read, the shared grains are not."""
    keys = prompt(24)
    world.save(prompt_objects(keys[:12]))
    saved = world.save(prompt_objects(keys, first=12, anchors=(24,)))
    new_client(world, 1 << 20)
    world.fetch(keys[:12], 0)
    reads(world)
    fetched = world.fetch(keys, 24)
    assert (len(fetched.grains), fetched.anchor_grain, fetched.memory_bytes) == (24, 24, 12 * GRAIN_BYTES)
    assert reads(world) == 11 * len(saved)
    assert_right(fetched, keys)


def test_a_prompt_larger_than_the_memory_keeps_its_beginning(world):
    keys = prompt(12)
    world.save(prompt_objects(keys))
    new_client(world, 5 * GRAIN_BYTES + 100)
    for expected in (0, 5, 5):
        fetched = world.fetch(keys, 0)
        assert (len(fetched.grains), fetched.memory_bytes) == (12, expected * GRAIN_BYTES)
        assert_right(fetched, keys)
    assert world.client.memory.held_bytes == 5 * GRAIN_BYTES


def test_the_prompt_unused_for_longest_goes_first(world):
    prompts = [prompt(4, seed) for seed in range(3)]
    for keys in prompts:
        world.save(prompt_objects(keys))
    new_client(world, 8 * GRAIN_BYTES)
    for turn in (0, 1, 0, 2):
        world.fetch(prompts[turn], 0)
    assert [world.fetch(prompts[turn], 0).memory_bytes // GRAIN_BYTES for turn in (2, 0, 1)] == [4, 4, 0]


def test_a_lost_stripe_behind_cached_grains_shortens_the_prefix_and_the_index_forgets(world):
    keys = prompt(40)
    saved = world.save(prompt_objects(keys, anchors=(8, 24, 40)))
    victim = next(item.record for item in saved if any(e.grain_index == 30 for e in item.record.table))
    new_client(world, 1 << 20)
    first_lost = min(e.grain_index for e in victim.table if e.kind is Kind.GRAIN)
    world.fetch(keys[:10], 8)
    for place in victim.locations[:3]:
        world.node_of(place.device)._node.delete((place,))
    fetched = world.fetch(keys, 40)
    assert (len(fetched.grains), fetched.anchor_grain) == (first_lost, 24)
    assert fetched.memory_bytes == 10 * GRAIN_BYTES + ANCHOR_BYTES * 0
    assert "lost" in fetched.reason
    assert_right(fetched, keys)
    assert world.index.match(keys, 99_999).grains_matched == first_lost


def test_what_the_index_does_not_offer_is_not_served(world):
    """The index decides what is stored: memory only saves the reading."""
    keys = prompt(8)
    (saved,) = world.save(prompt_objects(keys))
    world.index.report_lost(saved.record.stripe_id, saved.record.generation)
    sweep(world.index, world.nodes, world.config)
    fetched = world.fetch(keys, 0)
    assert (fetched.grains, fetched.memory_bytes) == ((), 0)


def test_damage_on_disk_is_not_remembered_as_truth(world):
    """Three flipped fragments: a miss, and nothing of the stripe comes into memory."""
    keys = prompt(8)
    (saved,) = world.save(prompt_objects(keys))
    for place in saved.record.locations[:3]:
        path = world.root / place.device / f"{place.segment:010d}.seg"
        raw = bytearray(path.read_bytes())
        raw[place.offset + place.length // 2] ^= 1
        path.write_bytes(raw)
    new_client(world, 1 << 20)
    assert world.fetch(keys, 0).grains == ()
    assert world.client.memory.objects == 0


def test_what_did_not_become_durable_is_not_remembered(world):
    for device in ("d06", "d07"):
        world.lose_directory(device)
    world.client.put(prompt_objects(prompt(5)))
    (failed,) = world.client.flush()
    assert isinstance(failed, WriteFailed)
    assert world.client.memory.objects == 0


def test_a_payload_reused_by_its_owner_after_the_save_does_not_change_the_memory(world):
    keys = prompt(3)
    buffers = [bytearray(item.payload) for item in prompt_objects(keys)]
    objects = [
        type(item)(item.kind, item.key, item.parent, item.grain_index, item.traffic, memoryview(buffer))
        for item, buffer in zip(prompt_objects(keys), buffers, strict=True)
    ]
    world.save(objects)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    fetched = world.fetch(keys, 0)
    assert fetched.memory_bytes == 3 * GRAIN_BYTES
    assert_right(fetched, keys)


def test_views_are_read_only(world):
    keys = prompt(3)
    world.save(prompt_objects(keys, anchors=(3,)))
    fetched = world.fetch(keys, 3)
    assert all(view.readonly for view in (*fetched.grains, fetched.anchor))


def test_threads_share_one_cache():
    cache = HostCache(20 * GRAIN_BYTES)
    wrong = []

    def work(seed: int) -> None:
        for turn in range(200):
            keys = prompt(6, seed=(seed + turn) % 5)
            views = [memoryview(payload(key, Kind.GRAIN, GRAIN_BYTES)) for key in keys]
            cache.keep([((Kind.GRAIN, key), view) for key, view in zip(keys, views, strict=True)])
            for key, view in zip(keys, views, strict=True):
                found = cache.get((Kind.GRAIN, key))
                if found is not None and found != view:
                    wrong.append(key)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert cache.usage.held_bytes <= 20 * GRAIN_BYTES


def test_the_configuration_refuses_a_negative_size_and_defaults_to_off(tmp_path):
    with pytest.raises(ValueError, match="host_cache_bytes = -1 must not be negative; use 0"):
        store_config(tmp_path, host_cache_bytes=-1)
    assert StoreConfig.__dataclass_fields__["host_cache_bytes"].default == 0
