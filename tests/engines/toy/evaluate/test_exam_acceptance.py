"""Counting accepted drafts, and how far the confidence is off, on figures worked out by hand."""

import pytest
from shoal.engines.toy.evaluate.acceptance import Step, calibration_error, confidence_pairs, reliability, summarise
from shoal.engines.toy.evaluate.drafting import judged_step
from shoal.engines.toy.evaluate.intervals import Share

SURE = (0.9,) * 5
END = 1


def test_a_rejected_draft_is_judged_and_those_behind_it_are_not():
    step = judged_step([10, 11, 12, 13, 14], accepted=2, confidence=SURE, end=END, room=50)
    assert (step.accepted, step.verified, step.is_cut, step.tokens) == (2, 3, False, 3)


def test_all_accepted_drafts_bring_a_bonus_token():
    step = judged_step([10, 11, 12, 13, 14], accepted=5, confidence=SURE, end=END, room=50)
    assert (step.accepted, step.verified, step.is_cut, step.tokens) == (5, 5, False, 6)


def test_drafts_behind_the_end_token_do_not_count():
    step = judged_step([10, END, 12, 13, 14], accepted=5, confidence=SURE, end=END, room=50)
    assert (step.accepted, step.verified, step.is_cut, step.tokens) == (2, 2, True, 2)


def test_an_end_token_that_was_rejected_ends_nothing():
    step = judged_step([10, END, 12, 13, 14], accepted=1, confidence=SURE, end=END, room=50)
    assert (step.accepted, step.verified, step.is_cut, step.tokens) == (1, 2, False, 2)


@pytest.mark.parametrize(("room", "tokens", "is_cut"), [(2, 2, True), (3, 3, True), (4, 4, False)])
def test_an_answer_takes_no_more_than_its_room(room: int, tokens: int, is_cut: bool):
    step = judged_step([10, 11, 12, 13, 14], accepted=3, confidence=SURE, end=END, room=room)
    assert (step.tokens, step.is_cut) == (tokens, is_cut)


def test_without_ends_the_figures_are_plain_means():
    counts = [0, 1, 1, 3, 5, 5]
    steps = [Step(n, min(n + 1, 5), False, SURE) for n in counts]
    found = summarise([steps], 5)
    assert found.drafts == pytest.approx(sum(counts) / len(counts))
    assert found.length == pytest.approx(found.served) == pytest.approx(sum(counts) / len(counts) + 1)
    assert found.judged == (6, 5, 3, 3, 2)
    assert found.by_position == pytest.approx((5 / 6, 3 / 5, 1, 2 / 3, 1))


def test_an_end_cuts_what_is_served_but_not_the_accepted_length():
    """A drafter that is always right is one also on answers that end after two or eight tokens."""
    whole, cut = Step(5, 5, False, SURE), Step(2, 2, True, SURE)
    found = summarise([[cut], [whole, cut]], 5)
    assert found.length == pytest.approx(6)
    assert found.served == pytest.approx((2 + 6 + 2) / 3)
    assert found.best == pytest.approx(found.served)


def test_best_is_what_the_fewest_steps_would_serve():
    found = summarise([[Step(0, 1, False, SURE)] * 12, [Step(0, 1, False, SURE)]], 5)
    assert found.served == 1
    assert found.best == pytest.approx(13 / (2 + 1))


def test_no_steps_are_no_figures():
    found = summarise([[], []], 5)
    assert (found.steps, found.drafts, found.served, found.best, found.calibration_error) == (0, 0, 0, 0, 0)


def test_only_judged_drafts_say_something_about_the_confidence():
    steps = [Step(1, 2, False, (0.1, 0.2, 0.3, 0.4, 0.5)), Step(1, 1, True, (0.6, 0.7, 0.8, 0.9, 1.0))]
    assert confidence_pairs(steps) == ([0.1, 0.2, 0.6], [True, False, True])


def test_the_calibration_error_weighs_each_bin_by_its_drafts():
    # 3 drafts at 0.15, one accepted; 1 draft at 0.95, rejected: (3 * |1/3 - 0.15| + 1 * |0 - 0.95|) / 4.
    bins = reliability([0.15, 0.15, 0.15, 0.95], [True, False, False, False])
    assert [(b.low, b.count) for b in bins] == [(0.1, 3), (0.9, 1)]
    assert calibration_error(bins) == pytest.approx((3 * (1 / 3 - 0.15) + 0.95) / 4)


def test_a_confidence_of_one_belongs_to_the_last_bin_and_can_be_perfect():
    bins = reliability([1.0, 1.0, 0.0], [True, True, False])
    assert [(b.low, b.high, b.count) for b in bins] == [(0.0, 0.1, 1), (0.9, 1.0, 2)]
    assert calibration_error(bins) == 0


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"), [(95, 100, 0.8882, 0.9785), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)]
)
def test_the_interval_is_wilsons(hits: int, count: int, low: float, high: float):
    """Published values of the Wilson score interval."""
    assert Share(hits, count).interval == pytest.approx((low, high), abs=1e-4)
