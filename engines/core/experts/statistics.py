"""What experts and ranks had to do: loads of a window of steps, and how unequal the ranks were (`moe_lb`)."""

from collections import deque

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.placement import Ints, Placement

Int64 = NDArray[np.int64]


class LoadWindow:
    """Tokens received by experts over the last `window` steps, kept as sums of `buckets` parts of the window.

    A window of 1,000 steps of 40 x 384 experts is 61 MB as counts and 3 MB as 25 buckets; a policy that looks for what
    repeats has no use for single steps. The window is rounded up to whole buckets; when the newest bucket begins, the
    oldest goes as a whole.
    """

    def __init__(self, window: int, layers: int, experts: int, buckets: int) -> None:
        self._bucket_steps = -(-window // max(1, min(buckets, window)))
        self._shape = (layers, experts)
        self._sums: deque[Int64] = deque(maxlen=-(-window // self._bucket_steps))
        self._steps = 0

    def add(self, counts: Ints) -> None:
        """Record one step: tokens received [layers, experts]."""
        assert counts.shape == self._shape, f"counts of shape {counts.shape} in a window of {self._shape}"
        if not self._sums or self._steps == self._bucket_steps:
            self._sums.append(np.zeros(self._shape, dtype=np.int64))
            self._steps = 0
        self._sums[-1] += counts
        self._steps += 1

    def loads(self) -> Int64:
        """Loads [buckets, layers, experts], oldest first; no bucket before the first step."""
        return np.stack(self._sums) if self._sums else np.zeros((0, *self._shape), dtype=np.int64)

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._steps = 0


def expert_counts(placement: Placement, received: Ints) -> Int64:
    """Tokens of experts [layers, experts] from tokens received at places [layers, places]."""
    layers, experts = placement.counts.shape
    names = placement.experts + np.arange(layers)[:, None] * experts
    # Weights are floats with 53 bits: exact far beyond the tokens of a window.
    sums = np.bincount(names.ravel(), weights=received.ravel(), minlength=layers * experts)
    return sums.astype(np.int64).reshape(layers, experts)


def rank_counts(received: Ints, ranks: int) -> Int64:
    """Tokens of ranks [layers, ranks] from tokens received at places [layers, places]."""
    sums: Int64 = received.reshape(len(received), ranks, -1).sum(-1, dtype=np.int64)
    return sums


def rank_loads(placement: Placement, loads: NDArray[np.number]) -> NDArray[np.float64]:
    """Loads of ranks [steps, layers, ranks] if experts' tokens [steps, layers, experts] split evenly over replicas."""
    steps = len(loads)
    result = np.empty((steps, placement.layers, placement.ranks))
    rank_of = np.arange(placement.experts.shape[1]) // placement.size
    for layer in range(placement.layers):
        share = np.zeros((placement.expert_count, placement.ranks))
        np.add.at(share, (placement.experts[layer], rank_of), 1.0)
        share /= placement.counts[layer][:, None]
        result[:, layer] = loads[:, layer].astype(np.float64) @ share
    return result


class BalanceMeter:
    """`moe_lb` over a logging window: sum over steps and layers of the busiest rank / sum of the mean rank."""

    def __init__(self) -> None:
        self._mean_sum = 0.0
        self._max_sum = 0.0

    @property
    def mean_sum(self) -> float:
        """Sum over steps and layers of the mean over ranks."""
        return self._mean_sum

    @property
    def max_sum(self) -> float:
        """Sum over steps and layers of the maximum over ranks."""
        return self._max_sum

    def add(self, loads: NDArray[np.number]) -> None:
        """Add loads of ranks, [..., ranks], of any number of steps and layers."""
        self._mean_sum += float(loads.mean(-1).sum())
        self._max_sum += float(loads.max(-1).sum())

    @property
    def moe_lb(self) -> float:
        """1.0 is perfect, also without data."""
        return self._max_sum / self._mean_sum if self._mean_sum else 1.0

    def reset(self) -> None:
        """Start a new logging window."""
        self._mean_sum = self._max_sum = 0.0
