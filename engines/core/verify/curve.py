"""StepCurve: how long a decode step of a given size takes, as measured when the engine started."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.verify.sizes import first_size

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepCurve:
    """Milliseconds `ms[i]` of a forward of `sizes[i]` rows; a step of fewer rows is padded to the next size.

    Raises ValueError unless sizes increase from at least 1 and every time is finite and above 0. Times need not rise.
    """

    sizes: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the rules above."""
        if not self.sizes or len(self.sizes) != len(self.ms):
            raise ValueError(f"curve of {len(self.sizes)} sizes and {len(self.ms)} times: need one time a size")
        if self.sizes[0] < 1 or any(one >= other for one, other in pairwise(self.sizes)):
            raise ValueError(f"curve sizes = {list(self.sizes)} must increase from at least 1")
        if not all(math.isfinite(value) and value > 0 for value in self.ms):
            raise ValueError(f"curve ms = {list(self.ms)} must be finite and above 0")

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> "StepCurve":
        """From (size, ms) pairs in increasing order of size."""
        pairs = list(points)
        return cls(tuple(size for size, _ in pairs), tuple(float(ms) for _, ms in pairs))

    def of_every_row(self) -> "StepCurve":
        """This curve at every size up to its largest, for an engine that pads no step: straight between two sizes.

        Such a step never takes less time for having more rows, so a fall between sizes is noise: the times of both
        sides are averaged (isotonic regression). Below the first size the time is that of the first.
        """
        rows = np.arange(1, self.rows_max + 1)
        return StepCurve.of(zip(rows.tolist(), np.interp(rows, self.sizes, _rising(self.ms)).tolist(), strict=True))

    @property
    def rows_max(self) -> int:
        """The largest step that was measured."""
        return self.sizes[-1]

    def size_of(self, rows: int) -> int | None:
        """The size a step of `rows` is padded to, or None beyond the largest."""
        return first_size(self.sizes, rows)

    def time_ms(self, rows: int) -> float | None:
        """Time of a step of `rows`, or None beyond the largest size."""
        size = self.size_of(rows)
        return None if size is None else self.ms[self.sizes.index(size)]

    def times_ms(self, slope_ms: float, sampler_ms: float) -> Floats:
        """Predicted time of a step of r rows at [r], r = 0..rows_max: curve + slope * size + sampler.

        A new array; [0] is the first size's, for a step has at least one row.
        """
        padded, base = self._by_rows
        return base + (slope_ms * padded + sampler_ms)

    @cached_property
    def _by_rows(self) -> tuple[Floats, Floats]:
        """Padded size and curve time at [rows]: looked up once, for every step asks for all of them."""
        index = np.searchsorted(self.sizes, np.arange(self.rows_max + 1))
        return np.asarray(self.sizes, np.float64)[index], np.asarray(self.ms, np.float64)[index]


def _rising(values: Iterable[float]) -> list[float]:
    """The nearest values, by least squares, that never fall: neighbours that do are pooled into their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
