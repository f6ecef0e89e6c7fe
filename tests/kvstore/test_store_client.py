"""Put and fetch over real directories: same bytes after any two losses, clean misses after three, never wrong ones."""

import pickle
from concurrent.futures import Future
from itertools import combinations
from threading import Event, Thread

import pytest
from shoal.kvstore.config import CodeConfig, FsyncRule, IndexConfig
from shoal.kvstore.core.records import Kind, Refused, TrafficClass
from shoal.kvstore.local import LocalIndex
from shoal.kvstore.upkeep import sweep
from shoal.kvstore.write import WriteFailed
from store_world import RunningClock, World, assert_right, erased, payload, prompt, prompt_objects


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def test_what_was_put_is_matched_and_fetched(world):
    keys = prompt(30)
    saved = world.save(prompt_objects(keys, anchors=(20, 29)))
    assert len(saved) >= 3
    assert sum(outcome.objects_new for outcome in saved) == 32
    match = world.index.match(keys, 30 * 128 - 140, TrafficClass.CHAT)
    assert (match.grains_matched, match.anchor_grain) == (30, 20)
    fetched = world.fetch(keys[: match.anchor_grain], match.anchor_grain)
    assert (len(fetched.grains), fetched.anchor_grain, fetched.reason) == (20, 20, "")
    assert_right(fetched, keys)
    assert world.index.usage().pins == 0


def test_fragments_of_a_stripe_lie_on_twelve_devices_over_all_nodes(world):
    for outcome in world.save(prompt_objects(prompt(20))):
        devices = [place.device for place in outcome.record.locations]
        assert len(set(devices)) == 12


def test_a_fetch_asks_eleven_and_the_twelfth_only_when_needed(world):
    keys = prompt(5)
    (saved,) = world.save(prompt_objects(keys, anchors=(5,)))
    assert_right(world.fetch(keys, 5), keys)
    reads = [device for node in world.nodes.values() for device in node.reads]
    assert len(reads) == 11
    for place in saved.record.locations[:2]:  # one lost answer of eleven would be enough without the twelfth
        world.node_of(place.device).broken.add(place.device)
    assert_right(world.fetch(keys, 5), keys)
    assert sum(len(node.reads) for node in world.nodes.values()) == 11 + 12


def test_any_two_directories_deleted_while_live_give_the_same_bytes(world):
    keys = prompt(12)
    world.save(prompt_objects(keys, anchors=(12,)))
    world.lose_directory("d03")
    world.lose_directory("d08")
    fetched = world.fetch(keys, 12)
    assert (len(fetched.grains), fetched.anchor_grain) == (12, 12)
    assert_right(fetched, keys)


def test_all_66_pairs_of_unreachable_devices_give_the_same_bytes(world):
    keys = prompt(4)
    world.save(prompt_objects(keys, anchors=(4,)))
    names = [device.name for device in world.config.devices]
    for lost in combinations(names, 2):
        for node in world.nodes.values():
            node.broken = set(lost)
        fetched = world.fetch(keys, 4)
        assert (len(fetched.grains), fetched.anchor_grain) == (4, 4), lost
        assert_right(fetched, keys)


def test_three_lost_directories_are_a_miss_and_the_index_forgets(world):
    keys = prompt(12)
    world.save(prompt_objects(keys, anchors=(12,)))
    for device in ("d00", "d05", "d11"):
        world.lose_directory(device)
    fetched = world.fetch(keys, 12)
    assert (fetched.grains, fetched.anchor_grain, fetched.anchor) == ((), 0, None)
    assert "lost" in fetched.reason
    assert world.index.match(keys, 9_999).grains_matched == 0
    assert world.index.usage().pins == 0


def test_three_unreachable_devices_are_a_miss_now_and_a_hit_later(world):
    keys = prompt(6)
    world.save(prompt_objects(keys, anchors=(6,)))
    for node in world.nodes.values():
        node.broken = {"d00", "d05", "d11"}
    assert world.fetch(keys, 6).grains == ()
    for node in world.nodes.values():
        node.broken = set()
    fetched = world.fetch(keys, 6)
    assert fetched.anchor_grain == 6
    assert_right(fetched, keys)


def test_a_node_of_the_mapping_that_left_is_an_erasure(tmp_path):
    world = World(tmp_path, nodes=6)
    keys = prompt(4)
    world.save(prompt_objects(keys, anchors=(4,)))
    del world.nodes["n2"]
    assert_right(world.fetch(keys, 4), keys)
    assert world.fetch(keys, 4).anchor_grain == 4
    del world.nodes["n3"]
    assert world.fetch(keys, 4).anchor_grain == 0
    world.close()


def test_a_lost_tail_stripe_shortens_the_prefix_to_the_anchor_before(world):
    keys = prompt(40)
    saved = world.save(prompt_objects(keys, anchors=(8, 24, 40)))
    victim = next(item.record for item in saved if any(e.grain_index == 30 for e in item.record.table))
    for place in victim.locations[:3]:
        assert world.node_of(place.device)._node.delete((place,)).value == 1
    first_lost = min(e.grain_index for e in victim.table if e.kind is Kind.GRAIN)
    fetched = world.fetch(keys, 40)
    assert 24 <= len(fetched.grains) <= first_lost
    assert fetched.anchor_grain == 24
    assert_right(fetched, keys)
    assert world.index.match(keys, 99_999).grains_matched == first_lost


def test_flipped_bytes_on_two_disks_do_not_matter_and_on_three_are_a_miss(world):
    keys = prompt(8)
    (saved,) = world.save(prompt_objects(keys))
    for count, place in enumerate(saved.record.locations[:3], 1):
        path = world.root / place.device / f"{place.segment:010d}.seg"
        raw = bytearray(path.read_bytes())
        raw[place.offset + place.length // 2] ^= 1
        path.write_bytes(raw)
        fetched = world.fetch(keys, 0)
        assert len(fetched.grains) == (8 if count <= 2 else 0)
        assert_right(fetched, keys)


def test_fragments_swapped_between_two_stripes_are_erasures(world):
    """Whole valid records exchanged by a confused node: right checksums, wrong stripe."""
    one, other = prompt(8, seed=1), prompt(8, seed=2)
    (a,), (b,) = world.save(prompt_objects(one)), world.save(prompt_objects(other))
    exchange = {}
    for device in ("d01", "d02"):
        mine = next(place for place in a.record.locations if place.device == device)
        theirs = next(place for place in b.record.locations if place.device == device)
        exchange |= {mine: theirs, theirs: mine}
    for node in world.nodes.values():
        node.read = lambda location, read=node.read: read(exchange.get(location, location))
    for keys in (one, other):
        fetched = world.fetch(keys, 0)
        assert len(fetched.grains) == 8
        assert_right(fetched, keys)


def test_two_silent_devices_are_not_waited_for(tmp_path):
    world = World(tmp_path, clock=RunningClock())
    keys = prompt(5)
    world.save(prompt_objects(keys, anchors=(5,)))
    for node in world.nodes.values():
        node.held = {"d04": [], "d09": []}
    fetched = world.fetch(keys, 5, wait_us=60_000_000)
    assert (len(fetched.grains), fetched.anchor_grain) == (5, 5)
    assert_right(fetched, keys)
    world.close()


def test_three_silent_devices_are_a_miss_at_the_deadline(tmp_path):
    world = World(tmp_path, clock=RunningClock())
    keys = prompt(5)
    world.save(prompt_objects(keys))
    for node in world.nodes.values():
        node.held = {"d04": [], "d09": [], "d10": []}
    fetched = world.fetch(keys, 0, wait_us=300_000)
    assert fetched.grains == ()
    assert "deadline" in fetched.reason
    assert world.index.usage().pins == 0
    assert world.index.match(keys, 0).grains_matched == 5  # slow is not lost
    world.close()


def test_a_cancelled_fetch_ends_and_releases_its_pin(world):
    keys = prompt(5)
    world.save(prompt_objects(keys))
    for node in world.nodes.values():
        node.held = {device.name: [] for device in world.config.devices}
    cancelled, results = Event(), []
    thread = Thread(target=lambda: results.append(world.fetch(keys, 0, 10**12, cancelled)))
    thread.start()
    cancelled.set()
    thread.join(timeout=10)
    assert "cancelled" in results[0].reason
    assert world.index.usage().pins == 0


class LossyIndex(LocalIndex):
    """An index that cannot be reached when a pin is to be released."""

    def release(self, pin):
        future: Future = Future()
        future.set_exception(ConnectionError("the index does not answer"))
        return future


def test_a_pin_whose_release_is_lost_ends_with_its_fetchs_deadline(world):
    keys = prompt(5)
    world.save(prompt_objects(keys))
    world.client._index = LossyIndex(world.index)
    assert_right(world.fetch(keys, 0, wait_us=5_000_000), keys)
    assert world.index.usage().pins == 1
    world.clock.us += 5_000_000
    world.index.expire()
    assert world.index.usage().pins == 0


def test_late_erasures_bring_in_the_twelfth(world):
    keys = prompt(5)
    world.save(prompt_objects(keys))
    held = {"d00": [], "d01": []}
    for node in world.nodes.values():
        node.held = held
    results = []
    thread = Thread(target=lambda: results.append(world.fetch(keys, 0, 10**12)))
    thread.start()
    while thread.is_alive():
        for futures in held.values():
            while futures:
                futures.pop().set_result(erased("torn"))
        thread.join(timeout=0.001)
    assert len(results[0].grains) == 5
    assert_right(results[0], keys)


def test_one_refusing_device_still_acknowledges_and_two_do_not(world):
    world.lose_directory("d06")
    keys = prompt(5, seed=1)
    (saved,) = world.save(prompt_objects(keys))
    assert saved.record.locations.count(None) == 1
    assert_right(world.fetch(keys, 0), keys)
    world.lose_directory("d07")
    other = prompt(5, seed=2)
    world.client.put(prompt_objects(other))
    (failed,) = world.client.flush()
    assert isinstance(failed, WriteFailed)
    assert "10 fragments durable" in failed.reasons[0]
    assert world.index.match(other, 0).grains_matched == 0
    fragments = sum(usage.fragments for node in world.nodes.values() for usage in node.usage().result().value)
    assert fragments <= 12 + 10  # the failed stripe's own are being deleted
    world.clock.us += 1
    world.client.put(prompt_objects(other))
    (failed,) = world.client.flush()
    assert "needs 11 devices" in failed.reasons[0]  # it does not try devices that just refused


def test_spare_devices_take_over_from_one_that_refuses(tmp_path):
    world = World(tmp_path, devices=14)
    world.lose_directory("d06")
    for seed in range(8):
        (saved,) = world.save(prompt_objects(prompt(4, seed)))
    assert saved.record.locations.count(None) == 0
    world.close()


def test_a_stripe_is_sealed_by_size_or_by_age(world):
    keys = prompt(30)
    objects = prompt_objects(keys)
    assert world.client.put(objects[:2]) == ()
    assert world.client.flush(world.clock()) == ()
    world.clock.us += world.config.flush_us
    assert len(world.client.flush(world.clock())) == 1
    assert len(world.client.put(objects[2:])) == 2
    assert len(world.client.flush()) == 1
    assert world.client.flush() == ()
    assert world.index.match(keys, 0).grains_matched == 30


def test_a_put_over_the_buffer_is_refused_whole(tmp_path):
    world = World(tmp_path, buffer_bytes_max=96 << 10)
    refused = world.client.put(prompt_objects(prompt(30)))
    assert isinstance(refused, Refused)
    assert "put less" in refused.reason
    assert world.client.flush() == ()
    world.close()


def test_steady_state_at_capacity_evicts_and_reuses_space(tmp_path):
    """Ten times the capacity is written: no write fails, the newest prompts are there, the disks stay in bounds."""
    world = World(tmp_path, index=IndexConfig(capacity_bytes=2 << 20))
    for seed in range(120):
        world.save(prompt_objects(prompt(8, seed), anchors=(8,)))
        world.clock.us += 1_000
        assert sweep(world.index, world.nodes, world.config).reasons == ()
    usage = world.index.usage()
    assert usage.stored_bytes <= 2 << 20
    assert usage.freed_bytes == 0
    on_disk = sum(item.stored_bytes for node in world.nodes.values() for item in node.usage().result().value)
    assert on_disk == usage.stored_bytes
    for seed in (118, 119):
        keys = prompt(8, seed)
        assert_right(world.fetch(keys, 8), keys)
        assert world.fetch(keys, 8).anchor_grain == 8
    world.close()


def test_a_restart_finds_what_was_acknowledged(world):
    keys = prompt(40)
    world.save(prompt_objects(keys, anchors=(16, 40)))
    boot = world.index.match(keys, 0).boot_id
    before = world.index.usage()
    world.start()
    match = world.index.match(keys, 40 * 128)
    assert (match.grains_matched, match.anchor_grain) == (40, 40)
    assert match.boot_id != boot
    assert world.index.usage() == before
    fetched = world.fetch(keys, 40)
    assert len(fetched.grains) == 40
    assert_right(fetched, keys)


def test_a_restart_keeps_stripes_with_two_losses_and_drops_those_with_three(world):
    keys = prompt(40)
    saved = world.save(prompt_objects(keys))
    assert len(saved) >= 3
    for record, losses in ((saved[0].record, 2), (saved[1].record, 3)):
        for place in record.locations[:losses]:
            world.node_of(place.device)._node.delete((place,))
    world.clock.us += 60_000_000
    world.start()
    first = len([e for e in saved[0].record.table if e.kind is Kind.GRAIN])
    assert world.index.match(keys, 0).grains_matched == first
    assert_right(world.fetch(keys[:first], 0), keys)
    assert len(world.recovered.garbage) == 9  # what is left of the second stripe


def test_a_restart_after_eviction_does_not_bring_deleted_grains_back(tmp_path):
    world = World(tmp_path, index=IndexConfig(capacity_bytes=1 << 20))
    for seed in range(30):
        world.save(prompt_objects(prompt(8, seed)))
        world.clock.us += 1_000
        sweep(world.index, world.nodes, world.config)
    before = world.index.usage()
    world.start()
    assert world.index.usage().grains == before.grains
    world.close()


def test_other_codes_and_fsync_rules(tmp_path):
    world = World(
        tmp_path, devices=5, nodes=5, code=CodeConfig(3, 2, 4, 4), fsync=FsyncRule.ALWAYS, stripe_bytes=64 << 10
    )
    keys = prompt(10)
    world.save(prompt_objects(keys, anchors=(10,)))
    for device in ("d00", "d04"):
        world.lose_directory(device)
    assert world.fetch(keys, 10).anchor_grain == 10
    assert_right(world.fetch(keys, 10), keys)
    world.close()


def test_threads_put_and_fetch_together(world):
    wrong = []

    def work(seed: int) -> None:
        keys = prompt(10, seed)
        for turn in range(4):
            world.client.put(prompt_objects(keys, anchors=(10,)))
            world.client.flush()
            fetched = world.fetch(keys, 10)
            right = [payload(key, Kind.GRAIN, 9_216) for key in keys]
            if [bytes(grain) for grain in fetched.grains] != right or fetched.anchor_grain != 10:
                wrong.append((seed, turn, fetched.reason))

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert world.index.usage().pins == 0


def test_an_anchor_beyond_the_keys_is_a_callers_mistake(world):
    with pytest.raises(ValueError, match=r"anchor_grain = 3 must lie in 0 to 2 keys; pass Match.anchor_grain"):
        world.fetch(prompt(2), 3)


def test_everything_that_crosses_a_process_border_can_be_pickled(world):
    keys = prompt(3)
    (saved,) = world.save(prompt_objects(keys, anchors=(3,)))
    node = world.nodes["n0"]._node
    place = next(place for place in saved.record.locations if place.device in node._devices)
    for value in (
        saved,
        world.index.match(keys, 9_999),
        world.index.locate(keys, "x", 1_000),
        world.index.usage(),
        node.read(place),
        node.scan(place.device),
        node.usage(),
        erased("torn"),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
