"""Choices of the three balancers: costs, bounds, holds that cannot leak, groups that come and go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.balancers.config import DEADLINE, NO_GROUP, QUEUE, ROOM, TOO_LONG, DecodeConfig, EncodeConfig, PrefillConfig
from shoal.balancers.decode import DecodeBalancer
from shoal.balancers.encode import EncodeBalancer
from shoal.balancers.prefill import PrefillBalancer
from shoal.balancers.reports import (
    Choice,
    DecodeNeed,
    DecodeReport,
    EncodeNeed,
    EncodeReport,
    Full,
    GroupRef,
    PrefillNeed,
    PrefillReport,
)

A, B = GroupRef("p/0", 1), GroupRef("p/1", 1)


def prefill(**config: float) -> PrefillBalancer:
    balancer = PrefillBalancer(PrefillConfig(**config))
    balancer.set_ready((A, B), 0)
    return balancer


def decode(blocks: int = 100, slots: int = 8, **config: float) -> DecodeBalancer:
    balancer = DecodeBalancer(DecodeConfig(**config))
    balancer.set_ready((A, B), 0)
    for group in (A, B):
        balancer.report(DecodeReport(group, 1, blocks, blocks, slots, 0, 8), 0)
    return balancer


def encode(**config: float) -> EncodeBalancer:
    balancer = EncodeBalancer(EncodeConfig(**config))
    balancer.set_ready((A, B), 0)
    return balancer


def group_of(choice: Choice | Full) -> GroupRef:
    assert isinstance(choice, Choice), choice
    return choice.group


def test_shorter_queue_wins_and_terms_add_up():
    balancer = prefill()
    balancer.report(PrefillReport(A, 1, 5000, 3, tokens_per_s=1000.0), 0)
    balancer.report(PrefillReport(B, 1, 100, 9, tokens_per_s=1000.0), 0)
    choice = balancer.choose(PrefillNeed("r", 200), 0)
    assert group_of(choice) == B
    assert choice.cost_us == pytest.approx(300_000)
    assert all(s.cost_us == pytest.approx(sum(c for _, c in s.terms)) for s in choice.scores)


def test_choices_in_a_row_spread_before_any_report():
    """Reserve while selecting: without it all of a burst goes to one group."""
    balancer = prefill()
    chosen = [group_of(balancer.choose(PrefillNeed(f"r{i}", 100), 0)) for i in range(512)]
    assert chosen.count(A) == chosen.count(B) == 256


def test_locality_never_outweighs_a_queue():
    """One hot prefix: work that waits longer than a fetch takes goes to the other group, and the load stays even."""
    balancer = prefill()
    chosen = [group_of(balancer.choose(PrefillNeed(f"r{i}", 50, 4096, b"hot"), 0)) for i in range(200)]
    assert max(chosen.count(A), chosen.count(B)) / 100 <= 1.25
    idle = prefill()
    first = group_of(idle.choose(PrefillNeed("a", 50, 4096, b"hot"), 0))
    idle.release("a")
    assert group_of(idle.choose(PrefillNeed("b", 50, 4096, b"hot"), 0)) == first


def test_full_queue_says_when_to_come_back():
    balancer = prefill(queue_max=1)
    balancer.choose(PrefillNeed("a", 4000), 0)
    balancer.choose(PrefillNeed("b", 4000), 0)
    full = balancer.choose(PrefillNeed("c", 10), 0)
    assert isinstance(full, Full)
    assert full.code == QUEUE
    assert full.retry_after_us >= 1_000_000
    assert full.reason == "p/0: queue_full: 1 requests wait, at most 1; p/1: queue_full: 1 requests wait, at most 1"


def test_only_the_group_over_its_bound_is_avoided():
    balancer = prefill(queue_max=2)
    balancer.report(PrefillReport(A, 1, 1, 2), 0)
    balancer.report(PrefillReport(B, 1, 9000, 1), 0)
    assert group_of(balancer.choose(PrefillNeed("r", 1), 0)) == B


def test_deadline_that_cannot_be_met_is_refused_at_once():
    balancer = prefill(tokens_per_s=1000.0)
    full = balancer.choose(PrefillNeed("r", 5000, deadline_us=1_000_000), 0)
    assert isinstance(full, Full)
    assert full.code == DEADLINE
    assert isinstance(balancer.choose(PrefillNeed("r", 500, deadline_us=1_000_000), 0), Choice)


def test_excluded_groups_are_a_last_resort():
    balancer = prefill()
    assert group_of(balancer.choose(PrefillNeed("r", 10, excluded=("p/0",)), 0)) == B
    assert isinstance(balancer.choose(PrefillNeed("r", 10, excluded=("p/0", "p/1")), 0), Choice)


@pytest.mark.parametrize("maker", [PrefillBalancer, DecodeBalancer, EncodeBalancer])
def test_no_ready_group(maker):
    config = {PrefillBalancer: PrefillConfig(), DecodeBalancer: DecodeConfig(), EncodeBalancer: EncodeConfig()}[maker]
    need = {
        PrefillBalancer: PrefillNeed("r", 1),
        DecodeBalancer: DecodeNeed("r", 1, 1),
        EncodeBalancer: EncodeNeed("r", b"d", 1),
    }[maker]
    full = maker(config).choose(need, 0)
    assert isinstance(full, Full)
    assert full.code == NO_GROUP
    assert full.retry_after_us > 0


def test_a_hold_ends_by_report_release_time_or_loss():
    for end in ("report", "release", "time", "loss"):
        balancer = prefill(reservation_us=1000)
        group = group_of(balancer.choose(PrefillNeed("r", 10), 0))
        assert balancer.holds == 1
        if end == "report":
            balancer.report(PrefillReport(group, 1, 10, 1, known=("r",)), 1)
        elif end == "release":
            balancer.release("r")
            balancer.release("r")
        elif end == "time":
            balancer.report(PrefillReport(group, 1, 0, 0), 1000)
        else:
            balancer.set_ready(tuple(g for g in (A, B) if g != group), 1)
        assert balancer.holds == 0, end


def test_a_new_life_starts_empty_and_old_reports_are_ignored():
    balancer = prefill()
    balancer.report(PrefillReport(A, 5, 9000, 3), 0)
    balancer.report(PrefillReport(A, 4, 0, 0), 0)  # late
    assert group_of(balancer.choose(PrefillNeed("r", 1), 0)) == B
    again = GroupRef("p/0", 2)
    balancer.set_ready((again, B), 0)
    balancer.report(PrefillReport(A, 6, 0, 0), 0)
    balancer.report(PrefillReport(B, 1, 100, 1), 0)
    assert group_of(balancer.choose(PrefillNeed("q", 1), 0)) == again


def test_decode_counts_room_it_has_promised():
    balancer = decode(blocks=3, slots=2)
    results = [balancer.choose(DecodeNeed(f"r{i}", 256, 300), 0) for i in range(3)]
    assert [isinstance(r, Choice) for r in results] == [True, True, False]
    assert results[2].code == ROOM
    assert "lacks 1 blocks" in results[2].reason
    balancer.release("r0")
    assert isinstance(balancer.choose(DecodeNeed("r3", 256, 300), 0), Choice)


def test_decode_needs_a_slot_and_a_place():
    assert "lacks a slot" in decode(slots=0).choose(DecodeNeed("r", 1, 1), 0).reason
    balancer = decode()
    for group in (A, B):
        balancer.report(DecodeReport(group, 2, 100, 100, 8, 8, 8), 0)
    assert "a place (runs 8 of 8)" in balancer.choose(DecodeNeed("r", 1, 1), 0).reason


def test_few_long_sequences_weigh_more_than_many_short_ones():
    balancer = decode(context_us=1.0)
    balancer.report(DecodeReport(A, 2, 20, 100, 8, 3, 64, context_tokens=1_500_000), 0)
    balancer.report(DecodeReport(B, 2, 60, 100, 8, 7, 64, context_tokens=6_000), 0)
    assert group_of(balancer.choose(DecodeNeed("r", 100, 200), 0)) == B


def test_slower_group_is_avoided():
    balancer = decode()
    balancer.report(DecodeReport(A, 2, 100, 100, 8, 1, 8, 100, step_us=50_000.0), 0)
    balancer.report(DecodeReport(B, 2, 100, 100, 8, 2, 8, 100, step_us=5_000.0), 0)
    assert group_of(balancer.choose(DecodeNeed("r", 100, 200), 0)) == B


def test_what_never_fits_is_told_apart_from_what_does_not_fit_now():
    full = decode(blocks=4).choose(DecodeNeed("r", 100, 4 * 128 + 1), 0)
    assert isinstance(full, Full)
    assert full.code == TOO_LONG
    assert full.reason == "513 tokens at most; a group holds 512"


def test_a_decode_group_is_used_only_after_it_has_reported():
    balancer = DecodeBalancer(DecodeConfig())
    balancer.set_ready((A,), 0)
    assert balancer.choose(DecodeNeed("r", 1, 1), 0).code == NO_GROUP


def test_encoder_that_has_the_embedding_is_preferred():
    balancer = encode()
    balancer.report(EncodeReport(B, 1, 1000, 2, cached=(b"cat",)), 0)
    assert group_of(balancer.choose(EncodeNeed("r", b"cat", 500), 0)) == B
    assert group_of(balancer.choose(EncodeNeed("q", b"dog", 500), 0)) == A


def test_equal_images_meet_at_one_encoder():
    balancer = encode()
    chosen = {group_of(balancer.choose(EncodeNeed(f"r{i}", b"cat", 500), 0)) for i in range(6)}
    assert len(chosen) == 1


def test_encoder_queue_is_bounded():
    balancer = encode(queue_max=1)
    for group in (A, B):
        balancer.report(EncodeReport(group, 1, 100, 1), 0)
    full = balancer.choose(EncodeNeed("r", b"d", 10), 0)
    assert isinstance(full, Full)
    assert full.code == QUEUE


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 600)), max_size=60))
def test_holds_are_conserved(program):
    """Any order of choices, releases, confirmations, losses and time: nothing is promised twice, nothing leaks."""
    balancer, lives, now_us, live = decode(blocks=20, slots=4), {"p/0": 1, "p/1": 1}, 0, {}
    for verb, who, amount in program:
        now_us += amount
        if verb <= 1:
            result = balancer.choose(DecodeNeed(f"r{who}", amount, amount), now_us)
            live.pop(f"r{who}", None)
            if isinstance(result, Choice):
                live[f"r{who}"] = (result.group, -(-amount // 128))
        elif verb == 2:
            balancer.release(f"r{who}")
            live.pop(f"r{who}", None)
        else:
            name = f"p/{who % 2}"
            lives[name] += 1
            groups = tuple(GroupRef(n, e) for n, e in sorted(lives.items()))
            balancer.set_ready(groups, now_us)
            balancer.report(DecodeReport(GroupRef(name, lives[name]), 1, 20, 20, 4, 0, 8), now_us)
            live = {key: value for key, value in live.items() if value[0] in groups}
        assert balancer.holds == len(live)
        for group in {value[0] for value in live.values()}:
            mine = [blocks for where, blocks in live.values() if where == group]
            assert sum(mine) <= 20
            assert len(mine) <= 4
    balancer.set_ready((), now_us)
    assert balancer.holds == 0
