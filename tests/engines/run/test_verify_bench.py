"""The published table by the live chooser, and the loads that scheduler benches step."""

import pytest
from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.lengths import VerifySettings
from shoal.engines.run.published import DRAFTS, PUBLISHED, published_curve
from shoal.engines.run.scheduler_load import Case, OurLoad, expected_tokens
from shoal.engines.run.verify_bench import measure
from shoal.engines.run.verify_group_bench import measure as measure_group


@pytest.mark.parametrize("point", PUBLISHED, ids=lambda point: str(point.sequences))
def test_the_published_gain_comes_out_of_the_live_chooser(point):
    """Seeded, so not a matter of luck; few steps, so wider bounds than the figures of the benchmark itself."""
    figure = measure(point.sequences, steps=250, seed=0)
    assert figure.gain_percent > -0.5
    if point.gain_percent > 0:
        assert abs(figure.gain_percent - point.gain_percent) < 1.5
        assert abs(figure.verified - point.verified) < 0.4
        assert abs(figure.accepted - point.accepted) < 0.2


def test_the_curve_gives_the_published_gains_at_the_published_lengths():
    """The fit itself: both columns of the table with the fitted curve, no traffic and no chooser."""
    curve = published_curve(96)
    for one in PUBLISHED:
        # Between captured sizes the curve is a staircase; the fit was made on its formula.
        full, chosen = one.sequences * (1 + DRAFTS), one.sequences * (1 + one.verified)
        gain = (one.accepted / curve_ms(chosen)) / (one.accepted_full / curve_ms(full)) - 1
        assert 100 * gain == pytest.approx(one.gain_percent, abs=0.25)
        assert curve.time_ms(full) == pytest.approx(curve_ms(full))


def curve_ms(rows):
    return 10.0 * (1 + 9.8e-4 * rows + 4.5e-7 * rows * rows)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_a_load_stays_in_decode_with_every_sequence(drafts):
    load = OurLoad(Case(sequences=6, drafts=drafts, steps=60, prompt_tokens=300))
    tokens = [load.step().tokens for _ in range(60)]
    assert sum(tokens) / 60 / 6 == pytest.approx(expected_tokens(drafts), rel=0.1)


def test_a_load_that_chooses_lengths_verifies_fewer_rows():
    """The live scheduler takes the chooser: the same traffic outputs fewer tokens where rows are dear."""
    case = Case(sequences=60, drafts=DRAFTS, steps=30, prompt_tokens=300)
    chosen = OurLoad(case, VerifySettings(VerifyMode.VARLEN, DRAFTS, 60, published_curve(60)))
    full = OurLoad(case)
    fewer, all_rows = ([one.step().tokens for _ in range(30)] for one in (chosen, full))
    assert all(tokens >= 60 for tokens in fewer)
    assert 60 * 30 < sum(fewer) < sum(all_rows)


def test_a_group_that_chooses_together_never_does_worse_than_ranks_alone():
    figure = measure_group(sequences=32, spread=0.25, ranks=4, steps=40, seed=0)
    assert figure.group_over_alone_percent > 0
    assert figure.group_percent > figure.alone_percent
