"""What a scheduler gets for its sequences: settings, which rates count, and how measured times move the choice."""

from dataclasses import dataclass

import pytest
from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.estimators import StepEstimators, StepTimes
from shoal.engines.core.verify.group import GroupTotal, agree
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.core.verify.rates import NO_DRAFT, rate_queues

CURVE = StepCurve((2, 4, 6), (10.0, 13.0, 15.0))


@dataclass
class Held:
    """A sequence as far as lengths read it; by default no step of it is open."""

    accept_rates: tuple[float, ...] = ()
    prev_accept_rates: tuple[float, ...] = ()
    has_draft_info: bool = True
    drafts: tuple[int, ...] = (7, 8)
    schedule_count: int = 3
    process_count: int = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafts": -1}, "drafts = -1 must be at least 0"),
        ({"sequences_max": 0}, "sequences_max = 0 must be at least 1"),
        ({"drafts": 0}, "varlen chooses among drafts and drafts = 0; use full"),
        ({"mode": VerifyMode.FULL}, "full needs no curve"),
        ({"sequences_max": 7}, "ends at 6 rows and must reach sequences_max = 7"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        VerifySettings(**({"mode": VerifyMode.VARLEN, "drafts": 2, "sequences_max": 3, "curve": CURVE} | fields))


@pytest.mark.parametrize("mode", VerifyMode)
def test_without_a_curve_everybody_verifies_what_it_holds(mode):
    lengths = VerifyLengths(VerifySettings(mode, 2, 4))
    lengths.feed(StepTimes(2, 64, 12.0, 1.0))
    assert lengths.choose([Held(), Held(drafts=()), Held(drafts=(1,))]) == [3, 1, 2]
    assert lengths.last is None
    assert lengths.choose([]) == []


def test_an_engine_without_drafts_verifies_nothing():
    assert VerifyLengths(VerifySettings(VerifyMode.FULL, 0, 4)).choose([Held(drafts=()), Held(drafts=())]) == [1, 1]


def test_the_total_comes_from_the_step_before_and_the_split_from_the_latest():
    """Rates of the sequence that had none to speak of before: it gets the places that the other one justified."""
    good_before = Held((0.25, 0.125), (0.9375, 0.875))
    good_now = Held((0.875, 0.75), (0.25, 0.125))
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, 2, 3, CURVE))
    assert lengths.choose([good_before, good_now]) == [1, 3]
    assert lengths.last is not None
    assert (lengths.last.rows, lengths.last.time_ms) == (4, 13.0)
    assert lengths.last.tokens == 2 + 0.9375 + 0.875


def test_pads_of_a_fresh_sequence_are_not_worth_a_place_and_unknown_drafts_in_flight_are():
    fresh, in_flight = Held(has_draft_info=False), Held(has_draft_info=False, schedule_count=4)
    queues = rate_queues([fresh, in_flight, Held(drafts=())], 2)
    assert queues.size.tolist() == [[0.0, 0.0], [1.0, 1.0], [NO_DRAFT, NO_DRAFT]]
    assert queues.split.tolist() == queues.size.tolist()


def test_rates_that_are_not_one_a_draft_are_refused():
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, 2, 3, CURVE))
    with pytest.raises(ValueError, match="1 rates for 2 drafts"):
        lengths.choose([Held((0.5,), (0.5, 0.25))])
    with pytest.raises(ValueError, match="0 rates for 3 drafts of at most 2"):
        lengths.choose([Held(drafts=(1, 2, 3))])
    with pytest.raises(ValueError, match="4 sequences exceed sequences_max = 3"):
        lengths.choose([Held()] * 4)


def test_steps_that_take_longer_with_every_row_make_lengths_shorter():
    """Measured times say that rows cost more than the curve knew; the drafts with poor rates are dropped."""
    sequences = [Held((0.875, 0.375), (0.875, 0.375))] * 2
    curve = StepCurve((2, 4, 6), (10.0, 10.5, 11.0))
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, 2, 2, curve))
    assert lengths.choose(sequences) == [3, 3]
    for _ in range(10):
        lengths.feed(StepTimes(2, 6, 11.0 + 6 * 2.0, 0.5))
    assert lengths.corrections(2) == (2.0, 0.5)
    assert lengths.choose(sequences) == [2, 2]


def test_a_sampler_time_of_its_own_count_comes_first():
    estimators = StepEstimators(CURVE)
    for sampler_ms in (1.0, 2.0, 3.0, 4.0):
        estimators.feed(StepTimes(1, 2, 10.0, sampler_ms))
    assert (estimators.sampler_ms(1), estimators.sampler_ms(2)) == (0.0, 0.0)
    estimators.feed(StepTimes(2, 2, 10.0, 9.0))
    assert estimators.sampler_ms(1) == estimators.sampler_ms(2) == 3.0
    estimators.feed(StepTimes(1, 2, 9.0, 5.0))
    assert (estimators.sampler_ms(1), estimators.sampler_ms(2)) == (3.0, 3.5)
    assert estimators.slope_ms() == 0.0
    with pytest.raises(ValueError, match="graph_size = 7 is beyond the curve's 6"):
        estimators.feed(StepTimes(1, 7, 9.0, 5.0))


def test_a_rank_fills_the_size_its_group_agreed_on_and_then_chooses_alone_again():
    """Its own sequences are not worth 6 rows, but another rank's are and everybody waits for that one."""
    poor = [Held((0.25, 0.125), (0.25, 0.125))] * 2
    good = [Held((0.9375, 0.875), (0.9375, 0.875))] * 2
    one, other = (VerifyLengths(VerifySettings(VerifyMode.VARLEN, 2, 2, CURVE)) for _ in range(2))
    assert one.choose(poor) == [1, 1]
    offers = [one.offer(poor), other.offer(good)]
    total = agree(offers, CURVE.sizes)
    assert total.size == 6
    one.agree_on(total)
    assert one.choose(poor) == [3, 3]
    assert (one.last.rows, one.last.tokens, one.last.time_ms) == (6, 2.75, 15.0)
    assert one.choose(poor) == [1, 1]


def test_a_sequence_that_came_after_the_offer_still_has_its_row():
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, 2, 3, CURVE))
    lengths.agree_on(GroupTotal(2, 2.0, 10.0))
    assert lengths.choose([Held((0.5, 0.25), (0.5, 0.25))] * 3) == [1, 1, 1]


def test_full_lengths_offer_nothing():
    assert VerifyLengths(VerifySettings(VerifyMode.FULL, 2, 3)).offer([Held()]) is None
