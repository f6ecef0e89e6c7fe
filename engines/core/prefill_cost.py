"""What a prefill step costs, fitted while it runs, and how many rows of a prompt fit a time budget.

cost(step) = a + sum over chunks of b q + d q c + e q^2, with q rows behind c cached tokens: a start, work per row,
attention to what is cached, attention inside the chunk. Times are microseconds, whatever clock measured them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, sqrt
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS_MIN = 8
"""Steps before the fit is trusted: fewer tell four coefficients apart by their noise."""
MEMORY_STEPS = 256.0
"""A step's weight falls to 1/e after so many others: the curve follows a device that throttles or is shared."""
RESIDUALS = 64
OUTLIER = 3.0
"""Residuals beyond so many (normal) deviations weigh less, as Huber's loss has it: a pause is no cost of rows."""
DEVIATION_MIN = 0.01
"""Relative; below it the median deviation of a quiet device would make outliers of everything."""
PRIOR = 1e-5
"""Weight, against the measurements', of the belief that all cost is cost of rows. It decides only what steps that are
all alike leave open, and a chunk's size is then extrapolated as the cautious would."""
SCALES = np.array([1.0, 2.0**-10, 2.0**-22, 2.0**-20])
"""Units of the features (1, q, q c, q^2) that make them comparable: 1,024 rows behind 4,096."""
ROW = 1


class Chunk(NamedTuple):
    """`rows` of one prompt in a step, behind `cached` tokens."""

    rows: int
    cached: int


class Coefficients(NamedTuple):
    """Microseconds: of a step, of a row, of a row and cached token, of a pair of rows. None is negative."""

    start: float
    row: float
    cached: float
    pair: float

    def of(self, chunks: Iterable[Chunk]) -> float:
        """Predicted cost of a step with these chunks."""
        return self.start + sum(self.of_chunk(chunk) for chunk in chunks)

    def of_chunk(self, chunk: Chunk) -> float:
        """What a chunk adds to a step."""
        rows, cached = chunk
        return rows * (self.row + self.cached * cached + self.pair * rows)

    def rows_within(self, budget_us: float, cached: int) -> float:
        """The most rows (a real number, perhaps infinite) behind `cached` tokens that add at most `budget_us`."""
        if budget_us <= 0:
            return 0.0
        linear = self.row + self.cached * cached
        if self.pair:
            # The root of pair q^2 + linear q = budget, in the form that loses no digits where pair is small.
            root = linear + sqrt(linear * linear + 4 * self.pair * budget_us)
            return 2 * budget_us / root if root else 0.0  # a budget so small that its square vanishes
        return budget_us / linear if linear else inf


@dataclass(slots=True)
class PrefillCost:
    """The fit. `measured` feeds a step, `coefficients` is what is believed now."""

    coefficients: Coefficients | None = None
    _steps: int = 0
    _squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    _products: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    _residuals: deque[float] = field(default_factory=lambda: deque(maxlen=RESIDUALS))

    def measured(self, chunks: Sequence[Chunk], took_us: float) -> None:
        """Learn from a step that took `took_us` > 0. A step without chunks teaches nothing.

        Errors count relative to the step's time, so that short steps are fitted as well as long ones.
        """
        if not chunks:
            return
        if not 0 < took_us < inf:
            raise ValueError(f"took_us = {took_us} must be a positive time: give what a monotonic clock measured")
        x = _features(chunks) / took_us
        weight = self._trust(chunks, took_us)
        fade = 1 - 1 / MEMORY_STEPS
        self._squares = fade * self._squares + weight * np.outer(x, x)
        self._products = fade * self._products + weight * x
        self._steps += 1
        if self._steps >= STEPS_MIN:
            self.coefficients = _solve(self._squares, self._products)

    def _trust(self, chunks: Sequence[Chunk], took_us: float) -> float:
        """Weight of a measurement: 1, less for one that the fit did not expect at all."""
        if self.coefficients is None:
            return 1.0
        off = took_us / max(self.coefficients.of(chunks), 1e-9) - 1
        usual = max(DEVIATION_MIN, 1.4826 * median(map(abs, self._residuals))) if self._residuals else inf
        self._residuals.append(off)
        return min(1.0, OUTLIER * usual / abs(off)) if off else 1.0


def _features(chunks: Sequence[Chunk]) -> NDArray[np.float64]:
    """(1, sum q, sum q c, sum q^2) of a step, in SCALES."""
    rows = np.array([c.rows for c in chunks], dtype=np.float64)
    cached = np.array([c.cached for c in chunks], dtype=np.float64)
    found: NDArray[np.float64] = np.array([1.0, rows.sum(), rows @ cached, rows @ rows]) * SCALES
    return found


def _solve(squares: NDArray[np.float64], products: NDArray[np.float64]) -> Coefficients:
    """Non-negative least squares with a weak prior: the best of all sets of coefficients that may be non-zero.

    A feature that no step had (nothing was ever cached) has no coefficient.
    """
    seen = [one for one in range(4) if squares[one, one] > 0]
    believed = np.zeros(4)
    believed[ROW] = products[ROW] / squares[ROW, ROW]
    prior = PRIOR * np.diag(squares.diagonal())
    matrix, target = squares + prior, products + prior @ believed
    best: tuple[float, Any] = (inf, believed)
    for size in range(1, len(seen) + 1):
        for chosen in combinations(seen, size):
            own = np.array(chosen)
            part = np.linalg.solve(matrix[np.ix_(own, own)], target[own])
            if (part < 0).any():
                continue
            found = np.zeros(4)
            found[own] = part
            loss = float(found @ matrix @ found - 2 * target @ found)
            best = min(best, (loss, found), key=lambda one: one[0])
    return Coefficients(*(float(v) for v in best[1] * SCALES))
