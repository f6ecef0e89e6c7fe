"""Calibration of the drafter's confidence: finds a known distortion, and changes one tensor alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.weights import load_model_weights
from shoal.engines.toy.calibrate import HEAD, fitted_factor, scaled, write
from shoal.engines.toy.evaluate.acceptance import calibration_error, reliability


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_finds_the_factor_that_a_confidence_was_divided_by(factor: float):
    dice = np.random.default_rng(4)
    true = dice.normal(1.0, 2.0, 20_000)
    accepted = (dice.random(true.size) < 1 / (1 + np.exp(-true))).tolist()
    said = (1 / (1 + np.exp(-true / factor))).tolist()
    found = fitted_factor(said, accepted)
    assert found == pytest.approx(factor, rel=0.05)
    assert calibration_error(reliability(scaled(said, found), accepted)) < 0.02


def test_certainty_is_no_infinity():
    assert np.isfinite(fitted_factor([0.0, 1.0, 0.5], [False, True, True]))
    assert all(0 <= c <= 1 for c in scaled([0.0, 1.0], 3.0))


def test_needs_drafts():
    with pytest.raises(ValueError, match="no draft was judged"):
        fitted_factor([], [])


def test_writes_the_same_checkpoint_but_for_one_tensor(random_toy: Path, tmp_path: Path):
    write(random_toy, 1.5, tmp_path / "out")
    config = ModelConfig.from_dir(tmp_path / "out")
    before, after = (load_model_weights(d, config) for d in (random_toy, tmp_path / "out"))
    changed = [n for n in before if not torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))]
    assert [n.endswith(HEAD) for n in changed] == [True]
    assert torch.allclose(after[changed[0]].float(), 1.5 * before[changed[0]].float(), rtol=0.01)
