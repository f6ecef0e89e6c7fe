"""Measure a step curve: each captured size from large to small, one warm-up and five timed runs, the middle three."""

import math
from collections.abc import Callable, Sequence

from shoal.engines.core.verify.curve import StepCurve

WARM_UPS = 1
TIMED_RUNS = 5
TRIMMED = 1  # dropped at either end


def measure_curve(
    sizes: Sequence[int],
    run_ms: Callable[[int], float],
    barrier: Callable[[], None] = lambda: None,
    mean_of_ranks: Callable[[float], float] = lambda value: value,
    timed_runs: int = TIMED_RUNS,
) -> StepCurve:
    """The curve at increasing `sizes` (engine runtime notes 7.1).

    `run_ms(size)` runs one forward of `size` valid rows and returns its milliseconds, launch to end, nothing else; the
    caller spreads the rows over experts at random meanwhile, for made-up tokens would crowd a few. `barrier` follows
    each run, timed or not: ranks of an expert group start together. `mean_of_ranks` makes one value of theirs all, so
    that every rank gets the same curve; all ranks call this alike. Raises ValueError for a time that cannot be.
    """
    ms: dict[int, float] = {}
    for size in reversed(sizes):
        runs = []
        for _ in range(WARM_UPS + timed_runs):
            runs.append(run_ms(size))
            barrier()
        ms[size] = mean_of_ranks(trimmed_mean(runs[WARM_UPS:]))
        if not (math.isfinite(ms[size]) and ms[size] > 0):
            raise ValueError(f"a step of {size} rows was measured as {ms[size]} ms")
    return StepCurve(tuple(sizes), tuple(ms[size] for size in sizes))


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest."""
    kept = sorted(values)[TRIMMED : len(values) - TRIMMED]
    if not kept:
        raise ValueError(f"{len(values)} values are too few to drop {TRIMMED} at either end")
    return sum(kept) / len(kept)
