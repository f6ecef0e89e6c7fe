"""`shoal bench verify`: what verifying fewer drafts pays by the live chooser, beside the table DeepSeek published."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.run.published import DRAFTS, PUBLISHED, PublishedPoint, published_curve
from shoal.engines.run.verify_traffic import Traffic

FITTED = (
    "Curve: two parameters fitted to the published gains; its scale of 10 ms cancels out. Traffic: mean ease and "
    "spread of acceptance fitted to 3.30 tokens a step, the published lengths and gains; seeded, synthetic. "
    "Not fitted: the chooser, the sizes (step 8), and what it loses to rates a step old, fresh sequences and padding."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One rank at so many sequences: mean drafts verified, tokens a step chosen and in full, throughput change."""

    sequences: int
    verified: float
    accepted: float
    accepted_full: float
    gain_percent: float


def measure(sequences: int, steps: int, seed: int) -> Figure:
    """Both ways on the same traffic, by the curve's time of the size each step is padded to."""
    curve = published_curve(sequences)
    lengths = VerifyLengths(VerifySettings(VerifyMode.VARLEN, DRAFTS, sequences, curve))
    traffic = Traffic(sequences, seed)
    full = [1 + DRAFTS] * sequences
    verified, tokens, tokens_full, time_ms, time_full_ms = 0, 0, 0, 0.0, 0.0
    for _ in range(steps):
        rows = lengths.choose(traffic.held)
        verified += sum(rows) - sequences
        tokens += traffic.tokens(rows)
        tokens_full += traffic.tokens(full)
        time_ms += step_ms(curve, sum(rows))
        time_full_ms += step_ms(curve, sum(full))
        traffic.advance()
    gain = (tokens / time_ms) / (tokens_full / time_full_ms) - 1
    each = steps * sequences
    return Figure(sequences, verified / each, tokens / each, tokens_full / each, 100 * gain)


def step_ms(curve: StepCurve, rows: int) -> float:
    """Time of a step; every total that is chosen lies on the curve."""
    time_ms = curve.time_ms(rows)
    assert time_ms is not None, f"{rows} rows, and the curve ends at {curve.rows_max}"
    return time_ms


def lines_of(pairs: Sequence[tuple[Figure, PublishedPoint]]) -> list[str]:
    """A line a point, ours / published."""
    head = f"{'sequences a rank':>16}  {'drafts verified':>16}  {'tokens a step':>15}  {'of five drafts':>15}"
    lines = [f"{head}  {'throughput':>19}"]
    for ours, theirs in pairs:
        lines.append(
            f"{ours.sequences:>16}  {ours.verified:>8.2f} / {theirs.verified:.2f}  {ours.accepted:>8.2f} / "
            f"{theirs.accepted:.2f}  {ours.accepted_full:>8.2f} / {theirs.accepted_full:.2f}  "
            f"{ours.gain_percent:>+7.1f} / {theirs.gain_percent:+.1f} %"
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0."""
    parser = argparse.ArgumentParser(prog="verify bench", description=__doc__.partition(": ")[2], epilog=FITTED)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=3000, help="of each point (3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (0)")
    asked = parser.parse_args(arguments)
    if asked.steps < 1:
        sys.stderr.write(f"--steps = {asked.steps} must be at least 1\n")
        return 2
    pairs = [(measure(one.sequences, asked.steps, asked.seed), one) for one in PUBLISHED]
    if asked.json:
        rows = [{"ours": asdict(ours), "published": theirs._asdict()} for ours, theirs in pairs]
        sys.stdout.write(json.dumps({"bench": "verify", "fitted": FITTED, "rows": rows}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(["ours / published", *lines_of(pairs), "", FITTED]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
