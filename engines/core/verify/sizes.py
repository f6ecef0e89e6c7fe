"""The numbers of rows that decode steps are captured for, and the one a step uses."""

from bisect import bisect_left
from collections.abc import Sequence as Seq


def graph_sizes(rows_max: int, step: int) -> tuple[int, ...]:
    """Increasing sizes up to `rows_max` (engine runtime notes 7.5): powers of two below `step`, then its multiples.

    The last one is `rows_max` itself. Raises ValueError for a number below 1.
    """
    for name, value in (("rows_max", rows_max), ("step", step)):
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
    start = min(step, rows_max)
    powers = [1 << i for i in range(start.bit_length()) if 1 << i < start]
    return (*powers, *range(start, rows_max, start), rows_max)


def first_size(sizes: Seq[int], rows: int) -> int | None:
    """The smallest of increasing `sizes` that holds `rows`, or None; the rows between are padding."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None
