"""`shoal bench verify-time`: processor time of one choice of verification lengths, whole and in its parts."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.allocation import allocate, choose_total, split_places
from shoal.engines.core.verify.estimators import StepTimes
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.core.verify.rates import rate_queues
from shoal.engines.core.verify.redistribution import redistribute
from shoal.engines.run.published import DRAFTS, published_curve
from shoal.engines.run.verify_traffic import Traffic

SEQUENCES = (16, 32, 60, 96, 256)
REPEATS, CALLS = 40, 50
ALLOCATION_GOAL_US = 50.0  # of 256 sequences of five drafts


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of this thread, the least of many rounds: `choose` and `feed` are what a step pays.

    `allocation` is the greedy with both arrays ready, of which `total` and `split` are parts; `redistribution` the
    device's split in numpy.
    """

    sequences: int
    choose: float
    rates: float
    allocation: float
    total: float
    split: float
    redistribution: float
    feed: float


def measure(sequences: int) -> Times:
    """Time each part on seeded traffic, with estimators whose window is full."""
    curve = published_curve(sequences)
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, DRAFTS, sequences, curve))
    times = [StepTimes(sequences, size, ms + 0.001 * size, 1.5) for size, ms in zip(curve.sizes, curve.ms, strict=True)]
    for index in range(6000):
        lengths.feed(times[index % len(times)])
    traffic = Traffic(sequences, 0)
    for _ in range(3):
        traffic.advance()
    queues, times_ms = rate_queues(traffic.held, DRAFTS), curve.times_ms(0.001, 1.5)
    total = choose_total(queues.size, times_ms).rows
    confidences = np.random.default_rng(0).random((sequences, DRAFTS), np.float32)
    return Times(
        sequences,
        choose=_least_us(partial(lengths.choose, traffic.held)),
        rates=_least_us(partial(rate_queues, traffic.held, DRAFTS)),
        allocation=_least_us(partial(allocate, queues.size, queues.split, times_ms)),
        total=_least_us(partial(choose_total, queues.size, times_ms)),
        split=_least_us(partial(split_places, queues.split, total - sequences)),
        redistribution=_least_us(partial(redistribute, confidences, np.arange(sequences), total)),
        feed=_least_us(partial(lengths.feed, times[-1])),
    )


def _least_us(call: Callable[[], object]) -> float:
    """The least mean of a round of calls: what is above it is the machine's other work."""
    call()
    rounds = []
    for _ in range(REPEATS):
        worked = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - worked) / CALLS / 1e3)
    return min(rounds)


def lines_of(rows: Sequence[Times]) -> list[str]:
    """A line a case, and the goal."""
    names = [name for name in Times.__slots__ if name != "sequences"]
    lines = [f"{'sequences':>9}" + "".join(f"{name:>15}" for name in names)]
    lines += [f"{one.sequences:>9}" + "".join(f"{asdict(one)[n]:>12.1f} us" for n in names) for one in rows]
    lines.append(f"goal: an allocation of 256 sequences within {ALLOCATION_GOAL_US:.0f} us")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0."""
    parser = argparse.ArgumentParser(prog="verify-time bench", description=__doc__.partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    rows = [measure(sequences) for sequences in SEQUENCES]
    if asked.json:
        document = {"bench": "verify-time", "goal_us": ALLOCATION_GOAL_US, "rows": list(map(asdict, rows))}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(lines_of(rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
