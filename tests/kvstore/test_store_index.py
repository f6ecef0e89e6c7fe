"""The index: matches, anchors, time to live, capacity, pins and waiting orphans, as scenarios."""

import dataclasses

import pytest
from shoal.kvstore.config import IndexConfig, TtlConfig
from shoal.kvstore.core.index import StoreIndex
from shoal.kvstore.core.records import Kind, StripeRecord, TableEntry, TrafficClass

TTL = TtlConfig(agent_us=300, chat_us=700, default_us=300, max_age_us=5_000)
CONFIG = IndexConfig(capacity_bytes=100_000, ttl=TTL, orphan_grace_us=50, orphans_max=10)


def key(name: str, index: int) -> bytes:
    return f"{name}{index}".encode().ljust(16, b".")


def keys(name: str, count: int) -> list[bytes]:
    return [key(name, index) for index in range(count)]


def entry(name: str, index: int, kind: Kind = Kind.GRAIN, traffic=TrafficClass.CHAT, parent=None) -> TableEntry:
    before = parent or (key(name, index - 1) if index else bytes(16))
    return TableEntry(kind, key(name, index), before, index, traffic, 0, 1, bytes(16))


_ids = iter(range(10**9))


def stripe(*entries: TableEntry, created_us: int = 0, size: int = 1_000) -> StripeRecord:
    return StripeRecord(next(_ids).to_bytes(16), 1, 10, 2, size, size, created_us, (None,) * 12, entries)


def grains(name: str, count: int, anchors=(), first: int = 0, **more) -> StripeRecord:
    table = [entry(name, index) for index in range(first, count)]
    table += [entry(name, count - 1, Kind.ANCHOR) for count in anchors]
    return stripe(*table, **more)


def one_each(index: StoreIndex, name: str, count: int, now_us: int, anchors=()) -> None:
    """Every grain in its own stripe of 1000 bytes."""
    for at in range(count):
        own = (entry(name, at, Kind.ANCHOR),) if at + 1 in anchors else ()
        index.insert(stripe(entry(name, at), *own, created_us=now_us), now_us)


def new(**changes) -> StoreIndex:
    return StoreIndex(dataclasses.replace(CONFIG, **changes), "boot7")


def test_match_is_the_longest_prefix_and_the_largest_anchor_within_the_limit():
    index = new()
    index.insert(grains("a", 10, anchors=(3, 8)), 0)
    asked = keys("a", 12)
    for limit, anchor in ((12, 8), (8, 8), (7, 3), (3, 3), (2, 0), (0, 0)):
        match = index.match(asked, limit * 128 + 127, 1)
        assert (match.grains_matched, match.anchor_grain, match.boot_id) == (10, anchor, "boot7")
    assert index.match(asked[:5], 9_999, 1).anchor_grain == 3
    assert index.match(asked[:2], 9_999, 1).anchor_grain == 0
    assert index.match(keys("b", 4), 9_999, 1).grains_matched == 0
    assert index.match([], 9_999, 1).grains_matched == 0


def test_two_prompts_share_their_common_grains():
    index = new()
    index.insert(grains("a", 4), 0)
    fork = stripe(entry("b", 4, parent=key("a", 3)), entry("b", 5))
    assert index.insert(fork, 0) == 2
    assert index.match([*keys("a", 4), key("b", 4), key("b", 5)], 0, 1).grains_matched == 6
    assert index.match([*keys("a", 4), key("c", 4)], 0, 1).grains_matched == 4


def test_keys_of_no_one_prompt_match_nothing():
    index = new()
    index.insert(grains("a", 4), 0)
    assert index.match([key("a", 0), key("a", 2), key("a", 3)], 9_999, 1).grains_matched == 0


def test_a_hit_refreshes_the_whole_prefix_and_only_it():
    index = new()
    index.insert(grains("a", 6), 0)
    index.match(keys("a", 3), 0, 600)
    assert index.match(keys("a", 6), 0, 699).grains_matched == 6
    index = new()
    index.insert(grains("a", 6), 0)
    index.match(keys("a", 3), 0, 600)
    index.expire(701)  # the three that nobody asked for
    assert index.match(keys("a", 6), 0, 1_299).grains_matched == 3
    index.expire(1_299 + 700)
    assert index.usage.grains == 0


def test_classes_have_their_own_time_to_live():
    index = new()
    index.insert(stripe(entry("a", 0, traffic=TrafficClass.AGENT)), 0)
    index.insert(stripe(entry("c", 0, traffic=TrafficClass.CHAT)), 0)
    assert index.expire(299) == 0
    assert index.expire(300) == 1
    assert index.match(keys("c", 1), 0, 300).grains_matched == 1
    index.insert(stripe(entry("a", 0, traffic=TrafficClass.AGENT)), 300)
    index.match(keys("a", 1), 0, 310, TrafficClass.CHAT)  # a chat that hits an agent's grain keeps it as a chat's
    assert index.expire(1_000) == 1
    assert index.match(keys("a", 1), 0, 1_009).grains_matched == 1


def test_the_maximum_age_holds_however_often_a_grain_is_hit():
    index = new()
    index.insert(grains("a", 3), 0)
    for now_us in range(0, 5_000, 100):
        assert index.match(keys("a", 3), 0, now_us).grains_matched == 3
    assert index.match(keys("a", 3), 0, 5_000).grains_matched == 0
    assert index.usage.grains == 0


def test_a_young_tail_goes_with_its_old_head():
    index = new()
    index.insert(grains("a", 2), 0)
    for now_us in range(0, 5_000, 100):
        index.match(keys("a", 2), 0, now_us)
    index.insert(grains("a", 4, first=2, created_us=4_900), 4_900)
    assert index.match(keys("a", 4), 0, 4_999).grains_matched == 4
    assert index.match(keys("a", 4), 0, 5_000).grains_matched == 0
    assert index.usage.grains == 0


def test_recovered_grains_keep_their_age_and_get_a_full_time_to_live():
    index = new()
    index.insert(grains("a", 3, created_us=2_000), 6_900)
    assert index.match(keys("a", 3), 0, 6_999).grains_matched == 3
    assert index.match(keys("a", 3), 0, 7_000).grains_matched == 0


def test_capacity_evicts_the_least_recently_used_tail_first():
    index = new(capacity_bytes=10_000)
    one_each(index, "a", 5, 0)
    one_each(index, "b", 5, 1)
    index.match(keys("a", 5), 0, 2)
    one_each(index, "c", 3, 3)
    assert index.usage.grains == 10
    assert index.match(keys("b", 5), 0, 4).grains_matched == 2  # b lost its tail, not its head
    assert index.match(keys("a", 5), 0, 4).grains_matched == 5
    assert index.match(keys("c", 3), 0, 4).grains_matched == 3


def test_freed_stripes_count_until_their_deletion_is_confirmed():
    index = new(capacity_bytes=3_000)
    one_each(index, "a", 5, 0)
    freed = index.freed(10)
    assert [record.table[0].grain_index for record in freed] == [3, 4] or len(freed) == 2
    assert (index.usage.stored_bytes, index.usage.freed_bytes) == (5_000, 2_000)
    names = [(record.stripe_id, record.generation) for record in freed]
    assert index.freed(1) == freed[:1]
    assert index.confirm_deleted(names) == 2
    assert index.confirm_deleted(names) == 0
    assert index.usage.stored_bytes == 3_000


def test_a_stripe_is_freed_only_with_its_last_object():
    index = new()
    index.insert(grains("a", 3, anchors=(3,)), 0)
    index.match(keys("a", 1), 0, 500)
    index.expire(700)
    assert (index.usage.grains, index.usage.stripes, index.freed(9)) == (1, 1, ())
    index.expire(1_200)
    assert (index.usage.stripes, len(index.freed(9))) == (0, 1)


def test_a_pin_of_an_earlier_life_releases_nobody_elses():
    lives = [StoreIndex(CONFIG, boot_id) for boot_id in ("boot7", "boot8")]
    for index in lives:
        one_each(index, "a", 1, 0)
    earlier, later = (index.locate(keys("a", 1), "engine1", 1) for index in lives)
    assert lives[1].release(earlier.pin) is False
    assert lives[1].usage.pins == 1
    assert lives[1].release(later.pin) is True


def test_a_pinned_prefix_survives_expiry_eviction_and_age_until_released():
    index = new(capacity_bytes=3_000)
    one_each(index, "a", 3, 0, anchors=(2,))
    located = index.locate(keys("a", 3), "engine1", 1)
    assert located.grain_stripes == (0, 1, 2)
    assert (located.anchors, located.anchor_stripes) == ((2,), (1,))
    one_each(index, "b", 3, 2)  # needs the room; finds none that is free but its own
    assert index.match(keys("a", 3), 0, 3).grains_matched == 3
    index.expire(50_000)
    assert index.usage.grains == 3
    assert index.match(keys("a", 3), 0, 50_000).grains_matched == 0  # kept for its reader, offered to nobody
    assert index.release(located.pin) is True
    assert index.release(located.pin) is False
    index.expire(50_001)
    assert index.usage.grains == 0


def test_pins_of_a_lost_owner_end():
    index = new()
    one_each(index, "a", 2, 0)
    for owner in ("x", "y", "x"):
        index.locate(keys("a", 2), owner, 1)
    assert index.usage.pins == 3
    assert index.release_owner("x") == 2
    assert index.expire(10_000) == 0
    assert index.release_owner("y") == 1
    index.expire(10_001)
    assert index.usage.grains == 0


def test_grains_saved_out_of_order_wait_for_their_predecessor():
    index = new()
    assert index.insert(stripe(entry("a", 2), entry("a", 2, Kind.ANCHOR)), 0) == 0
    assert index.insert(stripe(entry("a", 1)), 10) == 0
    assert index.match(keys("a", 3), 9_999, 20).grains_matched == 0
    assert index.usage.orphans == 3
    assert index.insert(stripe(entry("a", 0)), 30) == 4
    match = index.match(keys("a", 3), 9_999, 40)
    assert (match.grains_matched, match.anchor_grain) == (3, 3)
    assert (index.usage.orphans, index.freed(9)) == (0, ())


def test_orphans_wait_only_so_long_and_so_many():
    index = new()
    index.insert(stripe(entry("a", 1)), 0)
    index.expire(49)
    assert index.usage.orphans == 1
    index.expire(50)
    assert (index.usage.orphans, len(index.freed(9))) == (0, 1)
    index.insert(stripe(*(entry(f"x{n}", 1) for n in range(15))), 60)
    assert index.usage.orphans == 10


def test_what_is_stored_already_is_not_stored_twice():
    index = new()
    first = grains("a", 3, anchors=(3,))
    assert index.insert(first, 0) == 4
    assert index.insert(first, 1) == 0
    assert index.insert(grains("a", 3, anchors=(3,)), 2) == 0
    assert len(index.freed(9)) == 1  # the second copy
    assert index.missing(keys("a", 4)) == (False, False, False, True)


def test_a_lost_stripe_takes_everything_behind_it():
    index = new()
    records = [stripe(entry("a", at), entry("a", at, Kind.ANCHOR)) for at in range(6)]
    for record in records:
        index.insert(record, 0)
    index.locate(keys("a", 6), "x", 1)
    assert index.report_lost(records[3].stripe_id, 1) == 3
    assert index.report_lost(records[3].stripe_id, 1) == 0
    match = index.match(keys("a", 6), 9_999, 2)
    assert (match.grains_matched, match.anchor_grain) == (3, 3)
    assert len(index.freed(9)) == 3
    assert index.usage.anchors == 3


def test_a_lost_anchor_stripe_costs_only_the_anchor():
    index = new()
    index.insert(grains("a", 4, anchors=(2,)), 0)
    anchor = stripe(entry("a", 3, Kind.ANCHOR))
    index.insert(anchor, 0)
    assert index.match(keys("a", 4), 9_999, 1).anchor_grain == 4
    assert index.report_lost(anchor.stripe_id, 1) == 0
    match = index.match(keys("a", 4), 9_999, 2)
    assert (match.grains_matched, match.anchor_grain) == (4, 2)


def test_time_that_steps_back_does_no_harm():
    index = new()
    index.insert(grains("a", 2, created_us=400), 400)
    assert index.match(keys("a", 2), 0, 100).grains_matched == 2
    assert index.expire(1_099) == 0
    assert index.expire(1_100) == 2


def test_the_queues_stay_bounded_under_hits():
    """A hit costs no queue item; eviction after a million of them looks at each leaf a bounded number of times."""
    index = new(capacity_bytes=1_000_000)
    for name in "abcdefgh":
        one_each(index, name, 4, 0)
    for turn in range(20_000):
        located = index.locate(keys("abcdefgh"[turn % 8], 4), "x", turn % 200)
        index.release(located.pin)
    assert len(index._recency) <= 64 + 4 * 33
    assert len(index._expiry) <= 64 + 4 * 33 + 33


@pytest.mark.parametrize("grains_asked", [1_024, 8_192])
def test_a_long_match_touches_few_grains(grains_asked):
    """Not a timed claim: the number of look-ups is logarithmic, counted by a sequence that counts."""

    class Counting(list):
        looked = 0

        def __getitem__(self, at):
            Counting.looked += 1
            return super().__getitem__(at)

    Counting.looked = 0
    index = StoreIndex(IndexConfig(1 << 40), "b")
    index.insert(grains("a", grains_asked, anchors=(grains_asked - 1,)), 0)
    match = index.match(Counting(keys("a", grains_asked)), 128 * grains_asked, 1)
    assert (match.grains_matched, match.anchor_grain) == (grains_asked, grains_asked - 1)
    assert Counting.looked <= 20


def test_a_hit_on_a_tail_that_is_lost_later_still_counts_for_the_head():
    """The hit marked only the tail; when the tail goes early, its predecessor inherits expiry and last use."""
    index = new(capacity_bytes=3_000)
    head, tail = stripe(entry("a", 0)), stripe(entry("a", 1))
    index.insert(head, 0)
    index.insert(tail, 0)
    one_each(index, "b", 1, 1)
    assert index.match(keys("a", 2), 0, 600).grains_matched == 2
    assert index.report_lost(tail.stripe_id, 1) == 1
    one_each(index, "c", 1, 610)
    one_each(index, "d", 1, 620)  # over capacity: b is the least recently used, not a's head
    assert index.missing([key("a", 0), key("b", 0), key("c", 0), key("d", 0)]) == (False, True, False, False)
    index.expire(1_299)
    assert index.missing([key("a", 0)]) == (False,)
    index.expire(1_300)
    assert index.missing([key("a", 0)]) == (True,)
