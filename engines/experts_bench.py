"""Measure the expert policy: balance on the window after the one it was solved on, against opponents, and its time.

`python -m shoal.engines.experts_bench [--json] [--seed N] [--windows N]` prints every figure. Loads are made up
(`engines/core/experts/traffic.py`): Zipf-shaped, with topics, drift and chance; no claim about a real model's router.
Nothing here is a test: a figure is reported next to its goal, never asserted.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import median

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.experts.moves import plan_moves
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.policy import BUCKETS, solve
from shoal.engines.core.experts.published import solve_published
from shoal.engines.core.experts.statistics import BalanceMeter, LoadWindow, rank_loads
from shoal.engines.core.experts.traffic import TrafficShape, windows

LAYERS, EXPERTS, TOP = 40, 384, 6
SOLVE_GOAL_MS = 50.0
REPEATS = 40
Window = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement; `goal` is the most it should be, 0 where there is none."""

    name: str
    value: float
    unit: str
    goal: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertsBench:
    """All figures of one run, in the order measured."""

    figures: tuple[Figure, ...]

    def lines(self) -> tuple[str, ...]:
        """A table row for each figure."""
        return tuple(
            f"{f.name:<64}{f.value:>9.3f} {f.unit:<3}"
            + (f"   goal <= {f.goal:g}: {'reached' if f.value <= f.goal else 'missed'}" if f.goal else "")
            for f in self.figures
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One deployment and its traffic; `goal` for `moe_lb`, 0 where there is none."""

    name: str
    shape: TrafficShape
    ranks: int
    spare: int
    window: int
    goal: float = 0.0

    @property
    def extra(self) -> int:
        """Places beyond one for each expert."""
        return self.ranks * self.spare


def cases() -> tuple[Case, ...]:
    """Decode at EP64 and prefill at EP8, each with mild traffic, for which the goals are meant, and with a hard one.

    Decode: 275 verified tokens a rank and step; sequences stay for hundreds of steps, so topics do. Prefill: 8,192
    tokens a rank and step out of a few prompts, so that every step has topics of its own.
    """
    decode, prefill = 64 * 275 * TOP, 8 * 8_192 * TOP
    calm = TrafficShape(LAYERS, EXPERTS, decode)
    bursts = TrafficShape(LAYERS, EXPERTS, prefill, topic_swing=1.0, topic_steps=5)
    hard = TrafficShape(LAYERS, EXPERTS, decode, zipf=0.8, topics=32, topic_spread=0.6, drift=0.25)
    restless = replace(hard, topic_swing=1.0, topic_steps=100)
    stormy = replace(hard, choices=prefill, topic_swing=1.5, topic_steps=5)
    return (
        Case("EP64 + 1", calm, 64, 1, 1_000, goal=1.09),
        Case("EP8 + 4", bursts, 8, 4, 100, goal=1.06),
        Case("EP64 + 1, hard", restless, 64, 1, 1_000),
        Case("EP8 + 4, hard", stormy, 8, 4, 100),
    )


def bench_experts(
    seed: int = 0, windows_count: int = 2, tell: Callable[[str], None] = lambda line: None
) -> ExpertsBench:
    """Measure everything; the published policy takes most of the minutes. `tell` hears what is going on."""
    figures: list[Figure] = []
    for case in cases():
        tell(f"{case.name}: {windows_count} windows of {case.window} steps")
        figures += balance_figures(case, seed, windows_count)
    for case in cases()[:2]:
        figures += time_figures(case, seed)
    return ExpertsBench(tuple(figures))


def balance_figures(case: Case, seed: int, windows_count: int) -> list[Figure]:
    """`moe_lb` over `windows_count` windows, each under what was solved on the window before it.

    `perfect` is 1.0 by definition. `in hindsight` solves on the measured window itself; `chance alone` is what ranks
    of equal expected load show, for their tokens are still drawn one by one.
    """
    start = Placement.start(LAYERS, EXPERTS, case.extra, case.ranks)
    plain = Placement.start(LAYERS, EXPERTS, -EXPERTS % case.ranks, case.ranks)
    names = ("not balanced", "published policy", "ours", "ours, in hindsight", "chance alone")
    meters = {name: BalanceMeter() for name in names}
    moved, published_s = [], []
    random = np.random.default_rng(seed)
    ours = start
    stream = windows(case.shape, case.window, seed)
    before = next(stream)
    for window in islice(stream, windows_count):
        after = solve(bucketed(before, case.window), ours)
        moved.append(len(plan_moves(ours, after).transfers) / after.experts.size)
        ours = after
        began = time.perf_counter()
        theirs = solve_published(before, case.ranks, case.extra)
        published_s.append(time.perf_counter() - began)
        hindsight = solve(bucketed(window, case.window), start)
        for name, placement in zip(names, (plain, theirs, ours, hindsight), strict=False):
            meters[name].add(rank_loads(placement, window))
        mean = window.sum(-1).mean() / case.ranks
        meters["chance alone"].add(random.poisson(mean, (case.window * LAYERS, case.ranks)))
        before = window
    figures = [
        Figure(f"{case.name}: moe_lb, {name}", meter.moe_lb, "", case.goal if name == "ours" else 0.0)
        for name, meter in meters.items()
    ]
    return [
        *figures,
        Figure(f"{case.name}: places filled from another rank, first time", moved[0], ""),
        *(Figure(f"{case.name}: places filled from another rank, later", median(moved[1:]), "") for _ in moved[1:2]),
        Figure(f"{case.name}: published policy, time to solve", median(published_s), "s"),
    ]


def time_figures(case: Case, seed: int) -> list[Figure]:
    """Milliseconds of one solve of all layers from a kept window, and of the plan of moves; one core.

    `anew`: from the start placement; `next`: from what was solved one window earlier. The least processor time of many
    repetitions is nearest to what it takes where nothing else runs; other work on the machine only adds to it.
    """
    first, second = (bucketed(w, case.window) for w in islice(windows(case.shape, case.window, seed), 2))
    start = Placement.start(LAYERS, EXPERTS, case.extra, case.ranks)
    solved = solve(first, start)
    name = f"{case.name}: {LAYERS} layers, {EXPERTS} -> {EXPERTS + case.extra} places"
    figures = []
    for kind, loads, current in (("anew", first, start), ("next", second, solved)):
        wall, processor = _times_ms(partial(solve, loads, current), REPEATS)
        figures += [
            Figure(f"{name}, {kind}, processor", processor, "ms", SOLVE_GOAL_MS),
            Figure(f"{name}, {kind}, best wall", wall, "ms"),
        ]
    _, processor = _times_ms(partial(plan_moves, start, solved), 3)
    return [*figures, Figure(f"{case.name}: plan of all moves, processor", processor, "ms")]


def bucketed(window: Window, steps: int) -> NDArray[np.int64]:
    """What an engine would have kept of the window."""
    kept = LoadWindow(steps, LAYERS, EXPERTS, BUCKETS)
    for counts in window:
        kept.add(counts)
    return kept.loads()


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0."""
    parser = argparse.ArgumentParser(prog="experts_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default 0)")
    parser.add_argument("--windows", type=int, default=2, help="windows measured in each case (default 2)")
    asked = parser.parse_args(arguments)

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")

    measured = bench_experts(asked.seed, max(1, asked.windows), tell)
    if asked.json:
        figures = [asdict(f) for f in measured.figures]
        sys.stdout.write(json.dumps({"bench": "experts", "seed": asked.seed, "figures": figures}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(measured.lines()) + "\n")
    return 0


def _times_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least wall and least processor time of a call."""
    wall, processor = [], []
    for _ in range(repeats):
        began, worked = time.perf_counter(), time.process_time()
        call()
        wall.append((time.perf_counter() - began) * 1e3)
        processor.append((time.process_time() - worked) * 1e3)
    return min(wall), min(processor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
