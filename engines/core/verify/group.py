"""One choice of size for all ranks of an expert group: its step takes as long as that of the slowest."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from shoal.engines.core.verify.curve import Floats, StepCurve

# Tokens offered at a size that does not hold a row for every sequence; sums of it stay below every real offer.
CANNOT = -1e30


class Offer(NamedTuple):
    """What one rank would make of a step in which no rank has more rows than a size: [sizes] of the common curve.

    `tokens` it expects to output, CANNOT where its sequences do not fit; `time_ms` it takes at that size itself. Ranks
    agree by one sum over `tokens` and one maximum over `time_ms`, as they do about the kind of step.
    """

    tokens: Floats
    time_ms: Floats


def offer(rates: Floats, curve: StepCurve, slope_ms: float, sampler_ms: float) -> Offer:
    """A rank's offer by the rates that may decide a total (`RateQueues.size`): [sequences, drafts], maybe none.

    Best rates first, as `choose_total`. A rank without sequences runs its placeholder row and outputs nothing.
    """
    sizes = np.asarray(curve.sizes)
    time_ms = np.asarray(curve.ms) + slope_ms * sizes + sampler_ms
    count = len(rates)
    held = np.sort(rates[rates >= 0])[::-1]
    tokens = count + np.concatenate(([0.0], held.cumsum()))
    places = np.clip(sizes - count, 0, len(held))
    return Offer(np.where(sizes < count, CANNOT, tokens[places]), time_ms)


class GroupTotal(NamedTuple):
    """The most rows any rank has in a step, and why: `tokens` of all ranks together in `time_ms`."""

    size: int
    tokens: float
    time_ms: float


def agree(offers: Seq[Offer], sizes: Seq[int]) -> GroupTotal:
    """The size with most tokens of the group a millisecond, the smaller if equal; the same on every rank.

    `offers` are those of all ranks, or one that was summed and maximised already. Raises ValueError if a rank's
    sequences fit no size.
    """
    tokens = np.sum([one.tokens for one in offers], axis=0)
    time_ms = np.max([one.time_ms for one in offers], axis=0)
    if tokens[-1] < 0:
        raise ValueError(f"a rank has more sequences than the largest size, {sizes[-1]}")
    best = int((tokens / time_ms).argmax())
    return GroupTotal(sizes[best], float(tokens[best]), float(time_ms[best]))


def rank_total(rates: Floats, size: int) -> int:
    """Rows of a rank in a step of `size`: a row a sequence, then drafts while there is room and a chance.

    Fewer than it would choose alone on a rank with more sequences than others, more on one with fewer: the time is
    spent either way. Drafts of rate 0 (pads) are left out. Raises ValueError if its sequences do not fit.
    """
    count = len(rates)
    if count > size:
        raise ValueError(f"{count} sequences do not fit a step of {size} rows, the size the group agreed on")
    return min(size, count + int(np.count_nonzero(rates > 0)))
