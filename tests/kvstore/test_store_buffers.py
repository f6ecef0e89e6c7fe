"""Buffers that are used again, and checksums: neither may ever let one stripe's bytes pass for another's."""

import gc
from itertools import combinations
from threading import Thread

import google_crc32c
import numpy as np
import pytest
from shoal.kvstore.core.records import Kind, Miss, StoredObject, TrafficClass
from shoal.kvstore.core.stripe import Gathering, StripeShape, encode_stripe
from shoal.kvstore.io.buffers import BufferPool
from shoal.kvstore.io.checksums import checksums, crc32c
from shoal.kvstore.io.isal import IsalCode
from store_world import World, assert_right, prompt, prompt_objects

CODE, SUMS = IsalCode(), checksums()
SHAPE = StripeShape(b"S" * 16, 3, 10, 2, 1234)
MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 1_000, 32_767, 32_768, 32_769, 1_000_003])
def test_crc32c_is_the_one_of_another_library(size):
    raw = np.random.default_rng(size).bytes(size + 3)
    for start in range(3):
        piece = memoryview(raw)[start : start + size]
        assert crc32c(piece) == google_crc32c.value(bytes(piece))


def test_crc32c_is_the_published_check_value():
    assert crc32c(b"123456789") == 0xE3069283  # of the polynomial of RFC 3720


def test_memory_comes_back_only_when_the_last_view_is_gone():
    pool = BufferPool(8 * MIB)
    array = pool.take(MIB)
    array[:] = 7
    row = array.reshape(4, -1)[2]
    view = row.data[5:9].toreadonly()
    del array
    assert pool.idle_bytes == 0
    del row
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(MIB)
    other[:] = 9
    assert bytes(view) == bytes((7,)) * 4
    del view
    assert pool.idle_bytes == MIB
    again = pool.take(MIB - 5_000)
    assert (pool.idle_bytes, len(again)) == (0, MIB - 5_000)


def test_idle_memory_is_bounded_and_a_buffer_too_large_by_far_is_not_used():
    pool = BufferPool(2 * MIB)
    held = [pool.take(MIB) for _ in range(5)]
    held.clear()
    assert pool.idle_bytes == 2 * MIB
    small = pool.take(100)
    assert pool.idle_bytes == 2 * MIB
    assert len(small) == 100
    del small
    assert BufferPool(0).take(10).nbytes == 10


def test_threads_never_share_a_buffer():
    pool, wrong = BufferPool(4 * MIB), []

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.take(64 * 1024)
            array[:] = number
            if array.min() != number or array.max() != number:
                wrong.append(number)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong


def test_what_a_fetch_gave_stays_right_while_later_ones_use_the_buffers_again(tmp_path):
    world = World(tmp_path, idle_bytes_max=4 * MIB)
    prompts = [prompt(12, seed) for seed in range(6)]
    for keys in prompts:
        world.save(prompt_objects(keys, anchors=(12,)))
    kept = []
    for turn, keys in enumerate(prompts * 3):
        if turn == 6:
            world.lose_directory("d03")  # from here on some shards are rebuilt
        fetched = world.fetch(keys, 12)
        assert (len(fetched.grains), fetched.anchor_grain) == (12, 12)
        if turn % 3 == 0:
            kept.append((keys, fetched))
    for keys, fetched in kept:
        assert_right(fetched, keys)
    world.close()


def items(count: int = 9, size: int = 3_333) -> list[StoredObject]:
    rng = np.random.default_rng(0)
    return [
        StoredObject(Kind.GRAIN, rng.bytes(16), rng.bytes(16), at, TrafficClass.AGENT, rng.bytes(size + at))
        for at in range(count)
    ]


def gathered(raws: dict[int, bytes]) -> Gathering:
    """Fragments as devices vouch for them."""
    gathering = Gathering(SHAPE.stripe_id, SHAPE.generation, (SHAPE.data, SHAPE.parity), CODE, SUMS)
    for index, raw in raws.items():
        assert gathering.offer(index, raw, is_summed=True) is None
    return gathering


def damaged(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes((raw[place] ^ 4,)) + raw[place + 1 :]


def test_damage_after_the_devices_check_is_never_served_and_found_by_a_recheck():
    """Any two fragments flipped on their way: decoding says which objects are wrong, the recheck which fragments."""
    objects = items()
    stripe = encode_stripe(SHAPE, objects, CODE, SUMS)
    raws = [head + payload for head, payload in zip(stripe.heads, stripe.payloads, strict=True)]
    expected = {(item.kind, item.key): item.payload for item in objects}
    for pair in combinations(range(12), 2):
        broken = {at: damaged(raw, len(raw) - 200) if at in pair else raw for at, raw in enumerate(raws)}
        gathering = gathered(broken)
        found = gathering.decode()
        for name, value in found.items():
            assert isinstance(value, Miss) or value == expected[name]
        if pair[0] < 9:  # shard 9 ends in padding, which no object covers
            assert any(isinstance(value, Miss) for value in found.values()), pair
        assert len(gathering.recheck()) == 2
        assert gathering.is_ready
        assert gathering.decode() == expected
        assert gathering.recheck() == ()


def test_a_fetch_recovers_from_damage_on_the_way_from_the_nodes(tmp_path):
    """Valid answers of the devices, flipped in between: two are replaced, three are a miss, and nothing is wrong."""
    world = World(tmp_path)
    keys = prompt(5)
    (saved,) = world.save(prompt_objects(keys, anchors=(5,)))
    flipped: set[str] = set()
    for node in world.nodes.values():
        view = node._node.view

        def read(location, view=view):
            reply = view(location)
            if location.device not in flipped:
                return reply
            raw = bytearray(reply.value)
            raw[-300] ^= 1
            return type(reply)(reply.boot_id, memoryview(bytes(raw)))

        node._node.view = read
    for count, place in enumerate(saved.record.locations[:3], 1):
        flipped.add(place.device)
        fetched = world.fetch(keys, 5)
        assert len(fetched.grains) == (5 if count <= 2 else 0), fetched.reason
        assert_right(fetched, keys)
    assert "CRC32C differs" in fetched.reason
    assert world.client.memory.objects == 0
    world.close()


def test_objects_across_any_number_of_shards_come_back_whole():
    """Objects within one shard are views of it; others are joined from two, three or all of them."""
    rng = np.random.default_rng(3)
    sizes = [10, 40_000, 3, 9_000, 64, 1, 20_000, 4_096]
    objects = [
        StoredObject(Kind.ANCHOR, rng.bytes(16), rng.bytes(16), at, TrafficClass.CHAT, rng.bytes(size))
        for at, size in enumerate(sizes)
    ]
    stripe = encode_stripe(SHAPE, objects, CODE, SUMS)
    raws = [head + payload for head, payload in zip(stripe.heads, stripe.payloads, strict=True)]
    for lost in ((), (0, 1), (4, 9), (11,)):
        found = gathered({at: raw for at, raw in enumerate(raws) if at not in lost}).decode()
        assert found == {(item.kind, item.key): item.payload for item in objects}
        assert all(view.readonly for view in found.values())
