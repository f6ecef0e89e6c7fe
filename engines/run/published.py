"""DeepSeek's published figures of variable verification lengths, and the step curve that was fitted to them."""

from typing import NamedTuple

from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.sizes import graph_sizes

DRAFTS = 5
GRAPH_STEP = 8
# T(n) / a = 1 + ALPHA n + BETA n^2 of n rows a rank: two parameters fitted to the four published gains (within 0.2
# point). The scale is not published; 10 ms is a guess between the bounds of perfect and of usual kernels.
CURVE_MS, CURVE_ALPHA, CURVE_BETA = 10.0, 9.8e-4, 4.5e-7


class PublishedPoint(NamedTuple):
    """EP64, five drafts: sequences a rank; mean drafts verified; tokens a step with it and with all; gain in %."""

    sequences: int
    verified: float
    accepted: float
    accepted_full: float
    gain_percent: float


PUBLISHED = (
    PublishedPoint(16, 4.44, 3.24, 3.32, -1.5),
    PublishedPoint(32, 3.65, 3.17, 3.25, 1.6),
    PublishedPoint(60, 3.58, 3.21, 3.30, 5.4),
    PublishedPoint(96, 3.24, 3.15, 3.30, 11.0),
)


def published_curve(sequences_max: int) -> StepCurve:
    """The fitted curve at the sizes captured for so many sequences of five drafts."""
    sizes = graph_sizes(sequences_max * (1 + DRAFTS), GRAPH_STEP)
    return StepCurve(sizes, tuple(CURVE_MS * (1 + CURVE_ALPHA * n + CURVE_BETA * n * n) for n in sizes))
