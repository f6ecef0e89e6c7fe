"""`shoal bench verify-group`: what one choice of size for a whole expert group pays over ranks that choose alone."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.group import agree
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.run.published import DRAFTS, published_curve
from shoal.engines.run.verify_bench import step_ms
from shoal.engines.run.verify_traffic import Traffic

SEQUENCES = (16, 32, 60, 96)
SPREADS = (0.0, 0.1, 0.25)
MODEL = (
    "Model: a step takes as long as the largest padded size of any rank, by the curve fitted to the published gains; "
    "sequences of a rank are normal around the mean with the given relative spread; traffic as in `bench verify`."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Throughput change in % against verifying every draft, and of the group's choice against ranks alone."""

    sequences: int
    spread: float
    alone_percent: float
    group_percent: float
    group_over_alone_percent: float


def measure(sequences: int, spread: float, ranks: int, steps: int, seed: int) -> Figure:
    """The same traffic three ways: all drafts, each rank's own choice, and the group's."""
    random = np.random.default_rng((seed, sequences))
    counts = np.maximum(1, np.rint(random.normal(sequences, spread * sequences, ranks))).astype(int).tolist()
    curve = published_curve(max(counts))
    settings = VerifySettings(VerifyMode.VARLEN, DRAFTS, max(counts), curve)
    loads = [(VerifyLengths(settings), Traffic(count, seed * 1009 + at)) for at, count in enumerate(counts)]
    tokens = dict.fromkeys(("full", "alone", "group"), 0)
    time_ms = dict.fromkeys(tokens, 0.0)
    for _ in range(steps):
        ways = {
            "full": [[1 + DRAFTS] * count for count in counts],
            "alone": [lengths.choose(traffic.held) for lengths, traffic in loads],
        }
        total = agree([one for ln, traffic in loads if (one := ln.offer(traffic.held)) is not None], curve.sizes)
        for lengths, _traffic in loads:
            lengths.agree_on(total)
        ways["group"] = [lengths.choose(traffic.held) for lengths, traffic in loads]
        for way, rows in ways.items():
            tokens[way] += sum(traffic.tokens(one) for one, (_, traffic) in zip(rows, loads, strict=True))
            time_ms[way] += max(step_ms(curve, sum(one)) for one in rows)
        for _lengths, traffic in loads:
            traffic.advance()
    rate = {way: tokens[way] / time_ms[way] for way in tokens}
    gains = (100 * (rate[a] / rate[b] - 1) for a, b in (("alone", "full"), ("group", "full"), ("group", "alone")))
    return Figure(sequences, spread, *gains)


def lines_of(figures: Sequence[Figure]) -> list[str]:
    """A line a case."""
    head = f"{'sequences a rank':>16}  {'spread':>6}  {'alone':>8}  {'group':>8}  {'group over alone':>16}"
    return [head] + [
        f"{one.sequences:>16}  {one.spread:>6.2f}  {one.alone_percent:>+6.1f} %  {one.group_percent:>+6.1f} %  "
        f"{one.group_over_alone_percent:>+14.1f} %"
        for one in figures
    ]


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0, or 2 for numbers below 1."""
    parser = argparse.ArgumentParser(prog="verify-group bench", description=__doc__.partition(": ")[2], epilog=MODEL)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", type=int, default=16, help="of the group (16)")
    parser.add_argument("--steps", type=int, default=150, help="of each case (150)")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (0)")
    asked = parser.parse_args(arguments)
    if asked.ranks < 1 or asked.steps < 1:
        sys.stderr.write(f"--ranks = {asked.ranks} and --steps = {asked.steps} must be at least 1\n")
        return 2
    figures = [measure(n, spread, asked.ranks, asked.steps, asked.seed) for spread in SPREADS for n in SEQUENCES]
    if asked.json:
        document = {"bench": "verify-group", "ranks": asked.ranks, "model": MODEL, "rows": list(map(asdict, figures))}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([f"against every draft, {asked.ranks} ranks", *lines_of(figures), "", MODEL]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
