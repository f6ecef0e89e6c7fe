"""What verification steps add up to: accepted length, acceptance of each position, calibration of the confidence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One verification of k drafts.

    `accepted` leading drafts were right; `verified` of them were judged: the accepted ones and the first rejected
    one. `is_cut`: the answer ended with the last accepted draft, so that drafts after it were not judged and no bonus
    token was drawn. `confidence` is the drafter's probability that each of the k drafts is accepted, given that those
    before it were.
    """

    accepted: int
    verified: int
    is_cut: bool
    confidence: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the answer that this step produced."""
        return self.accepted + (0 if self.is_cut else 1)


@dataclass(frozen=True, slots=True)
class Bin:
    """Judged drafts whose confidence lies in [low, high): how many, their mean confidence and share accepted."""

    low: float
    high: float
    count: int
    confidence: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Summary of many steps.

    `by_position[i]` is the share of drafts i accepted among those judged, so given that the drafts before it were
    accepted and the answer had not ended; 0 where none was judged. `drafts` is the mean of accepted drafts a step and
    `length` one more, with the bonus token, in the middle of an answer: steps that the answer's end cuts short count
    as far as they were judged (a product-limit estimate; without such steps, the plain means). `served` is the plain
    mean of tokens a step, ends included, and `best` what a drafter that is always right would reach on the same
    answers. `calibration_error` weighs |accepted - confidence| of each bin by its share of judged drafts.
    """

    steps: int
    tokens: int
    by_position: tuple[float, ...]
    judged: tuple[int, ...]
    drafts: float
    served: float
    best: float
    calibration_error: float
    bins: tuple[Bin, ...]

    @property
    def length(self) -> float:
        """Accepted drafts and the bonus token."""
        return self.drafts + 1


def summarise(answers: Iterable[Sequence[Step]], drafts_count: int) -> Acceptance:
    """The summary of all steps of several answers with `drafts_count` drafts a step."""
    answers = [steps for steps in answers if steps]
    steps = [step for answer in answers for step in answer]
    judged = tuple(sum(step.verified > i for step in steps) for i in range(drafts_count))
    kept = tuple(sum(step.accepted > i for step in steps) for i in range(drafts_count))
    by_position = tuple(k / j if j else 0.0 for k, j in zip(kept, judged, strict=True))
    tokens = sum(step.tokens for step in steps)
    least = sum(-(-sum(step.tokens for step in answer) // (drafts_count + 1)) for answer in answers)
    bins = reliability(*confidence_pairs(steps))
    return Acceptance(
        steps=len(steps),
        tokens=tokens,
        by_position=by_position,
        judged=judged,
        drafts=float(np.cumprod(by_position).sum()),
        served=tokens / len(steps) if steps else 0.0,
        best=tokens / least if least else 0.0,
        calibration_error=calibration_error(bins),
        bins=bins,
    )


def confidence_pairs(steps: Iterable[Step]) -> tuple[list[float], list[bool]]:
    """Confidence and outcome of every judged draft."""
    pairs = [(step.confidence[i], i < step.accepted) for step in steps for i in range(step.verified)]
    return [c for c, _ in pairs], [hit for _, hit in pairs]


def reliability(confidence: Sequence[float], accepted: Sequence[bool]) -> tuple[Bin, ...]:
    """Ten bins of equal width over [0, 1], the last one closed; empty ones are left out."""
    values, hits = np.asarray(confidence, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
    places = np.minimum((values * BINS).astype(np.int64), BINS - 1)
    bins = []
    for i in range(BINS):
        inside = places == i
        if inside.any():
            means = float(values[inside].mean()), float(hits[inside].mean())
            bins.append(Bin(i / BINS, (i + 1) / BINS, int(inside.sum()), *means))
    return tuple(bins)


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean of |accepted - confidence| over drafts, by bin; 0 without drafts."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accepted - b.confidence) for b in bins) / total if total else 0.0
