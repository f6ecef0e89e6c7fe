"""The chain policy against rules written one grain at a time: no holes, limits hold, pins stay, promises are kept."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.kvstore.core.policy.chained import ChainPolicy, ChainRules

GRAINS = 40
PARENT = [-1, *(n // 2 for n in range(GRAINS - 1))]  # a tree: grain 0 first, then two behind each
TTL_US = (10, 25)


def chain(grain: int) -> np.ndarray:
    ids = []
    while grain >= 0:
        ids.append(grain)
        grain = PARENT[grain]
    return np.array(ids[::-1], np.int32)


steps = st.lists(
    st.tuples(st.integers(0, GRAINS - 1), st.integers(0, 12), st.integers(0, 1), st.sampled_from("sssspr")), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(6, 20), st.one_of(st.none(), st.integers(5, 60)))
def test_prefixes_stay_whole_and_limits_hold(steps: list, capacity: int, age_max_us: int | None) -> None:
    policy = ChainPolicy(ChainRules(capacity=capacity, ttl_us=TTL_US, age_max_us=age_max_us), GRAINS)
    now, pins = 0, {}
    for grain, wait, traffic, verb in steps:
        now += wait
        ids = chain(grain)
        policy.expire(now)
        if verb == "r" and pins:
            assert policy.release(min(pins), now)
            del pins[min(pins)]
        elif verb == "p" and (hits := policy.lookup(ids, now)):
            pins[policy.pin(ids[:hits], traffic)] = ids[:hits]
        else:
            before = policy.lookup(ids, now)
            assert policy.serve(ids, now, traffic).hits == before
        resident = {g for g in range(GRAINS) if policy._serial_of[g] > 0}
        assert all(PARENT[g] < 0 or PARENT[g] in resident for g in resident), "a hole"
        assert policy.live == len(resident)
        held = {int(g) for pinned in pins.values() for g in pinned}
        assert held <= resident
        assert policy.live <= max(capacity, len(held))


@settings(max_examples=60, deadline=None)
@given(steps)
def test_a_grain_lives_as_long_as_the_longest_promise(steps: list) -> None:
    """Without capacity the resident grains are exactly those whose latest due time has not passed."""
    policy, due, now = ChainPolicy(ChainRules(ttl_us=TTL_US), GRAINS), {}, 0
    for grain, wait, traffic, _ in steps:
        now += wait
        due = {g: at for g, at in due.items() if at >= now}
        ids = chain(grain)
        hits = next((n for n, g in enumerate(ids.tolist()) if g not in due), len(ids))
        assert policy.serve(ids, now, traffic).hits == hits
        for g in ids.tolist():
            due[g] = max(due.get(g, 0), now + TTL_US[traffic])
        assert policy.live == len(due)


def test_a_tenant_over_its_quota_loses_its_own_oldest() -> None:
    policy = ChainPolicy(ChainRules(quotas=(3, 100)), 100)
    policy.insert(np.array([50, 51], np.int32), 0, 0, 1)
    policy.insert(np.array([0, 1], np.int32), 1, 0, 0)
    gone = policy.insert(np.array([10, 11], np.int32), 2, 0, 0)
    assert gone.tolist() == [1]
    assert policy.lookup(np.array([50, 51], np.int32), 2) == 2


def test_second_touch_stores_what_is_asked_for_again() -> None:
    policy = ChainPolicy(ChainRules(second_touch_us=10), 100)
    ids = np.arange(4, dtype=np.int32)
    assert [policy.serve(ids, now).hits for now in (0, 20, 30, 31)] == [0, 0, 0, 4]
