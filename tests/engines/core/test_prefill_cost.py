"""The fitted cost of prefill steps: finds the truth behind noise, is not fooled by pauses, and solves for rows."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.config import STEP_TIME_AUTO, CacheConfig, EngineConfig, Role
from shoal.engines.core.plan import Accepted, StepKind, StepResult
from shoal.engines.core.prefill_cost import STEPS_MIN, Chunk, Coefficients, PrefillCost
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.core.scheduler import StepScheduler

TRUTH = Coefficients(start=2000.0, row=35.0, cached=0.004, pair=0.002)


def steps(dice: Random, count: int) -> list[list[Chunk]]:
    return [
        [Chunk(dice.randint(1, 2048), dice.choice((0, dice.randint(0, 60_000)))) for _ in range(dice.randint(1, 3))]
        for _ in range(count)
    ]


def fitted(times: list[tuple[list[Chunk], float]]) -> PrefillCost:
    cost = PrefillCost()
    for chunks, took in times:
        cost.measured(chunks, took)
    return cost


def worst(cost: PrefillCost, truth: Coefficients, dice: Random) -> float:
    assert cost.coefficients is not None
    return max(abs(cost.coefficients.of(s) / truth.of(s) - 1) for s in steps(dice, 200))


def test_finds_the_curve_behind_noise():
    dice = Random(1)
    cost = fitted([(s, TRUTH.of(s) * dice.gauss(1, 0.03)) for s in steps(dice, 300)])
    assert worst(cost, TRUTH, dice) < 0.04


def test_pauses_are_no_cost_of_rows():
    """A tenth of the steps meet a pause of five times their length, which plain least squares would spread over all."""
    dice = Random(2)
    cost = fitted([(s, TRUTH.of(s) * (5.0 if dice.random() < 0.1 else dice.gauss(1, 0.02))) for s in steps(dice, 400)])
    assert worst(cost, TRUTH, dice) < 0.12


def test_follows_a_device_that_becomes_slower():
    dice = Random(3)
    slower = Coefficients(*(2 * v for v in TRUTH))
    times = [(s, TRUTH.of(s)) for s in steps(dice, 400)] + [(s, slower.of(s)) for s in steps(dice, 1500)]
    assert worst(fitted(times), slower, dice) < 0.1


def test_steps_all_alike_are_taken_as_cost_of_rows():
    """Nothing tells the coefficients apart: twice the rows are then expected to take about twice the time."""
    cost = fitted([([Chunk(512, 0)], 20_000.0)] * 50).coefficients
    assert cost is not None
    assert cost.of([Chunk(512, 0)]) == pytest.approx(20_000, rel=0.01)
    assert cost.of([Chunk(1024, 0)]) == pytest.approx(40_000, rel=0.35)


def test_says_nothing_before_it_knows():
    cost = fitted([([Chunk(10 + i, 0)], 100.0) for i in range(STEPS_MIN - 1)])
    assert cost.coefficients is None
    cost.measured([], 0.0)
    assert cost.coefficients is None
    cost.measured([Chunk(50, 0)], 100.0)
    assert cost.coefficients is not None


@pytest.mark.parametrize("took", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_time(took: float):
    with pytest.raises(ValueError, match=r"took_us = .* must be a positive time"):
        PrefillCost().measured([Chunk(1, 0)], took)


positive = st.just(0.0) | st.floats(1e-6, 1e3)


@given(
    st.builds(Coefficients, st.just(0.0), positive, st.just(0.0) | st.floats(1e-6, 1), positive),
    st.floats(0, 1e9),
    st.integers(0, 1_000_000),
)
def test_rows_within_a_budget_cost_just_that(cost: Coefficients, budget: float, cached: int):
    rows = cost.rows_within(budget, cached)
    assert rows >= 0
    if rows == float("inf"):
        assert cost.of_chunk(Chunk(1_000_000, cached)) == 0
    elif budget:
        took = rows * (cost.row + cost.cached * cached + cost.pair * rows)
        assert took == pytest.approx(budget, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000), st.floats(1, 1e7)), min_size=8, max_size=60))
def test_coefficients_are_never_negative_and_always_finite(seen: list[tuple[int, int, float]]):
    cost = fitted([([Chunk(rows, cached)], took) for rows, cached, took in seen]).coefficients
    assert cost is not None
    assert all(0 <= v < float("inf") for v in cost)


class Timed:
    """A PROMPT scheduler whose steps take what TRUTH says; runs one prompt and tells its chunks."""

    def __init__(self, step_time_us: int, rows_max: int = 2048, blocks: int = 1024) -> None:
        config = EngineConfig(
            Role.PROMPT, 100_000, rows_max, step_time_us, 4, cache=CacheConfig(blocks_count=blocks, slots_count=6)
        )
        self.scheduler = StepScheduler(config, eos_token_id=1)

    def chunks(self, name: str, tokens: int) -> list[Chunk]:
        request = EngineRequest(name, (7,) * tokens, tokens, SamplingParams())
        assert isinstance(self.scheduler.submit(request, 0), Accepted)
        done: list[Chunk] = []
        while sum(c.rows for c in done) < tokens:
            plan = self.scheduler.plan(StepKind.PREFILL, 0)
            (item,) = plan.items
            done.append(Chunk(item.rows, item.start))
            self.scheduler.commit(plan, StepResult([5]), 0)
            self.scheduler.measured(plan, TRUTH.of(done[-1:]))
        self.scheduler.release(name)
        self.scheduler.check()
        return done


def test_chunks_shrink_with_what_is_cached_so_that_steps_keep_to_the_budget():
    timed = Timed(step_time_us=60_000)
    first = timed.chunks("learns", 60_000)
    assert first[0] == Chunk(2048, 0), "nothing is measured yet: rows alone limit the step"
    later = timed.chunks("knows", 60_000)[:-1]
    for chunk in later:
        assert TRUTH.of([chunk]) == pytest.approx(60_000, rel=0.05)
    assert later[-1].rows < 0.5 * later[0].rows


def test_auto_keeps_steps_as_long_as_the_whole_room_takes_without_a_context():
    timed = Timed(STEP_TIME_AUTO)
    timed.chunks("learns", 60_000)
    for chunk in timed.chunks("knows", 60_000)[:-1]:
        assert TRUTH.of([chunk]) == pytest.approx(TRUTH.of([Chunk(2048, 0)]), rel=0.05)


def test_a_budget_below_one_block_still_gets_on():
    timed = Timed(step_time_us=10)
    timed.chunks("learns", 30_000)
    assert {c.rows for c in timed.chunks("knows", 1280)} == {128}


def test_two_prompts_share_the_time_of_a_step():
    timed = Timed(step_time_us=60_000)
    timed.chunks("learns", 60_000)
    for name in ("a", "b"):
        timed.scheduler.submit(EngineRequest(name, (7,) * 1200, 1200, SamplingParams()), 0)
    plan = timed.scheduler.plan(StepKind.PREFILL, 0)
    chunks = [Chunk(item.rows, item.start) for item in plan.items]
    assert len(chunks) == 2
    assert TRUTH.of(chunks) == pytest.approx(60_000, rel=0.05)
