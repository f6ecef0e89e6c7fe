"""A directory of curves: what is found again, what is too old, whose files stay, and how a curve is measured."""

import dataclasses
import json
from dataclasses import replace

import pytest
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.run.curve_cache import GRACE_S, SKEW_S, TTL_S, CurveCache, CurveKey
from shoal.engines.run.curve_measure import measure_curve, trimmed_mean
from shoal.engines.run.curve_start import measured_sizes

NOW_S = 1_790_000_000
KEY = CurveKey("builtin:toy", (1, 2, 4), 1, 1, 2, "cpu x 2", (("torch", "2.13"), ("shoal", "0.1")))
CURVE = StepCurve((1, 2, 4), (1.0, 1.25, 1.5))
OTHER = {
    "model": "other", "dp": 2, "cp": 2, "ep": 4, "hardware": "gpu x 8", "versions": (("torch", "2.14"),), "unit": "us",
}  # fmt: skip


@pytest.fixture
def cache(tmp_path):
    return CurveCache(tmp_path / "curves")


def test_a_curve_is_found_again_while_it_is_young_enough(cache):
    assert cache.read(KEY, NOW_S) is None
    cache.write(KEY, CURVE, NOW_S)
    assert cache.read(KEY, NOW_S + TTL_S) == CURVE
    assert cache.read(KEY, NOW_S + TTL_S + 1) is None
    assert cache.read(KEY, NOW_S - SKEW_S) == CURVE
    assert cache.read(KEY, NOW_S - SKEW_S - 1) is None
    assert cache.read(replace(KEY, versions=KEY.versions[::-1]), NOW_S) == CURVE


@pytest.mark.parametrize("field", OTHER)
def test_a_curve_belongs_to_one_model_on_one_machine_with_one_software(cache, field):
    cache.write(KEY, CURVE, NOW_S)
    assert cache.read(replace(KEY, **{field: OTHER[field]}), NOW_S) is None


def test_every_field_of_a_key_counts():
    assert {*OTHER, "sizes"} == {one.name for one in dataclasses.fields(CurveKey)}


def test_the_newest_comes_first_and_a_damaged_one_is_passed_over(cache):
    cache.write(KEY, CURVE, NOW_S)
    newer = replace(CURVE, ms=(2.0, 2.25, 2.5))
    path = cache.write(KEY, newer, NOW_S + 10)
    assert cache.read(KEY, NOW_S + 10) == newer
    for damage in ("", "{}", json.dumps({"sizes": [1, 2], "ms": [1.0, 2.0]}), '{"sizes": [1, 2, 4], "ms": [1, 2, -1]}'):
        path.write_text(damage)
        assert cache.read(KEY, NOW_S + 10) == CURVE


def test_only_our_own_old_files_are_removed(cache):
    old = cache.write(KEY, CURVE, NOW_S)
    unfinished = old.with_suffix(".tmp")
    unfinished.write_text("{")
    strangers = [old.with_name(name) for name in ("notes.txt", "shoal-curve.json", f"a{old.name}", f"{old.name}.bak")]
    strangers.append(old.with_name(old.name.replace("shoal-curve.", "")))
    for path in strangers:
        path.write_text("theirs")
    assert cache.read(KEY, NOW_S) == CURVE
    assert cache.purge(NOW_S + TTL_S + GRACE_S) == ()
    fresh = cache.write(KEY, CURVE, NOW_S + TTL_S + GRACE_S + 1)
    assert sorted(cache.directory.iterdir()) == sorted([*strangers, fresh])
    assert all(path.read_text() == "theirs" for path in strangers)


def test_a_curve_of_other_sizes_is_refused(cache):
    with pytest.raises(ValueError, match="sizes"):
        cache.write(KEY, StepCurve((1, 2), (1.0, 2.0)), NOW_S)
    assert not cache.directory.exists()
    with pytest.raises(ValueError, match="ttl_s = 0"):
        CurveCache(cache.directory, 0)


def test_a_size_is_the_middle_of_five_runs_after_a_warm_up_the_largest_first():
    runs = {4: [99.0, 7.0, 1.0, 3.0, 2.0, 4.0], 2: [50.0, 1.0, 1.0, 1.0, 1.0, 90.0], 1: [9.0, 5.0, 4.0, 3.0, 2.0, 1.0]}
    order, waits = [], []

    def run_ms(size):
        order.append(size)
        return runs[size].pop(0)

    curve = measure_curve((1, 2, 4), run_ms, lambda: waits.append(len(order)), lambda value: value * 2)
    assert order == [4] * 6 + [2] * 6 + [1] * 6
    assert waits == list(range(1, 19))
    assert curve == StepCurve((1, 2, 4), (6.0, 2.0, 6.0))


def test_a_time_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"a step of 2 rows was measured as 0\.0 ms"):
        measure_curve((1, 2), lambda size: 0.0)
    with pytest.raises(ValueError, match="2 values are too few"):
        trimmed_mean([1.0, 2.0])


@pytest.mark.parametrize(
    ("rows_max", "sizes"), [(1, (1,)), (2, (1, 2)), (4, (1, 4)), (5, (1, 4, 5)), (48, (1, 4, 16, 48))]
)
def test_few_sizes_reach_the_largest_step(rows_max, sizes):
    assert measured_sizes(rows_max) == sizes
