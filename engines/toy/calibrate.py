"""`python -m shoal.engines.toy.calibrate CHECKPOINT OUT`: scale the drafter's confidence until it says what happens.

Training aims the confidence at how often a drawn draft is accepted, in text that is given. Served answers go on behind
what was accepted, also greedily, and there it is too modest. One factor on its logit, fitted to drafts that were judged
on questions that no examination asks (temperature scaling: Guo et al. 2017), makes up for that; it is multiplied into
the weights of the confidence head, so that nothing else has to know of it.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import CheckpointError
from shoal.engines.model.save import save_checkpoint
from shoal.engines.model.weights import load_model_weights
from shoal.engines.toy.evaluate.acceptance import calibration_error, confidence_pairs, reliability
from shoal.engines.toy.evaluate.jobs import Settings, jobs, run
from shoal.engines.toy.evaluate.papers import DRAFTS
from shoal.engines.toy.tokenizer import TOKENIZER_FILE

SEED = 1_000_003
"""Questions of this seed are for calibration: no examination reported anywhere uses it."""
HEAD = "confidence_head.proj.weight"
BOUNDS = (0.1, 10.0)
SEARCHES = 60
CERTAIN = 1e-6
"""Confidences are kept so far from 0 and 1, where their logits would be infinite."""


def fitted_factor(confidence: Sequence[float], accepted: Sequence[bool]) -> float:
    """The factor on the logits that makes the outcomes likeliest, within BOUNDS: golden-section search on its log.

    The likelihood of a logistic model has one maximum. Raises ValueError without drafts.
    """
    if not confidence:
        raise ValueError("no draft was judged: give more samples")
    logits, hits = _logits(confidence), np.asarray(accepted, dtype=np.float64)

    def surprise(log_factor: float) -> float:
        scaled = np.exp(log_factor) * logits
        return float(np.mean(np.logaddexp(0.0, scaled) - hits * scaled))

    low, high = np.log(BOUNDS)
    ratio = (np.sqrt(5.0) - 1) / 2
    for _ in range(SEARCHES):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if surprise(left) < surprise(right) else (left, high)
    return float(np.exp((low + high) / 2))


def scaled(confidence: Sequence[float], factor: float) -> list[float]:
    """Confidences as they will be once the factor is in the weights."""
    found: list[float] = (1 / (1 + np.exp(-factor * _logits(confidence)))).tolist()
    return found


def _logits(confidence: Sequence[float]) -> NDArray[np.float64]:
    sure = np.clip(np.asarray(confidence, dtype=np.float64), CERTAIN, 1 - CERTAIN)
    found: NDArray[np.float64] = np.log(sure / (1 - sure))
    return found


def write(checkpoint: Path, factor: float, target: Path) -> None:
    """The checkpoint with its confidence logits multiplied, in `target`. Raises CheckpointError, OSError."""
    config = ModelConfig.from_dir(checkpoint)
    tensors = dict(load_model_weights(checkpoint, config))
    (name,) = [n for n in tensors if n.endswith(HEAD)]
    tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    target.mkdir(parents=True, exist_ok=True)
    save_checkpoint(target, config, tensors)
    shutil.copyfile(checkpoint / TOKENIZER_FILE.name, target / TOKENIZER_FILE.name)


def main(arguments: list[str]) -> int:
    """Measure, fit, write; 1 for a checkpoint that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m shoal.engines.toy.calibrate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="what training wrote")
    parser.add_argument("out", type=Path, help="directory of the calibrated checkpoint")
    parser.add_argument("--samples", type=int, default=100, help="questions a paper (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default %(default)s)")
    given = parser.parse_args(arguments)
    settings = Settings(
        given.checkpoint.resolve(), seed=SEED, samples=given.samples, only=(DRAFTS,), workers=given.workers
    )
    confidence: list[float] = []
    accepted: list[bool] = []
    try:
        for outcome in run(settings, jobs(settings)):
            for answer in (*outcome.greedy, *outcome.sampled):
                said, happened = confidence_pairs(answer.steps)
                confidence, accepted = confidence + said, accepted + happened
        factor = fitted_factor(confidence, accepted)
        write(given.checkpoint, factor, given.out)
    except (CheckpointError, OSError, ValueError) as error:
        sys.stderr.write(f"calibrate: {error}\n")
        return 1
    before, after = (calibration_error(reliability(c, accepted)) for c in (confidence, scaled(confidence, factor)))
    sys.stdout.write(f"{len(confidence)} drafts judged; factor {factor:.3f}; error {before:.3f} -> {after:.3f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
