"""Shares of right answers and how far they may be off."""

from dataclasses import dataclass

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `count`."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        """The share, 0 of none."""
        return self.hits / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval (Wilson score): sensible also near 0 and 1, where all answers are right or wrong."""
        if not self.count:
            return 0.0, 1.0
        n, p, z = self.count, self.value, Z95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        reach = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        return max(0.0, middle - reach), min(1.0, middle + reach)
