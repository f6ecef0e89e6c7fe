"""`shoal bench scheduler`: processor time of planning and committing one decode step, ours and vLLM's interleaved."""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.lengths import VerifySettings
from shoal.engines.run.published import DRAFTS, published_curve
from shoal.engines.run.scheduler_load import Case, DecodeLoad, OurLoad, StepCost
from shoal.engines.run.scheduler_peer import HOW_TO_GET, PeerLoad, peer_version

SEQUENCES = (16, 32, 60, 96, 256)
WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One arm of one case: medians of processor time, the fastest tenth of wall time, tokens a sequence and step."""

    arm: str
    sequences: int
    drafts: int
    cpu_us: float
    wall_p10_us: float
    tokens_per_step: float

    @property
    def us_per_sequence(self) -> float:
        """Processor time of one sequence."""
        return self.cpu_us / self.sequences


def measure(case: Case, with_peer: bool) -> tuple[Row, ...]:
    """Step all arms in turn, so that a busy moment of the machine hits all alike."""
    loads: dict[str, DecodeLoad] = {"ours": OurLoad(case)}
    if case.drafts:
        varlen = VerifySettings(VerifyMode.VARLEN, case.drafts, case.sequences, published_curve(case.sequences))
        loads["ours, lengths chosen"] = OurLoad(case, varlen)
    if with_peer:
        loads["vllm"] = PeerLoad(case)
    gc.collect()
    gc.freeze()
    costs: Mapping[str, list[StepCost]] = {arm: [] for arm in loads}
    try:
        for _ in range(case.steps):
            for arm, load in loads.items():
                costs[arm].append(load.step())
    finally:
        gc.unfreeze()
    return tuple(_row(arm, case, seen[WARM_STEPS:]) for arm, seen in costs.items())


def _row(arm: str, case: Case, costs: Sequence[StepCost]) -> Row:
    wall = sorted(one.wall_us for one in costs)
    tokens = sum(one.tokens for one in costs) / len(costs) / case.sequences
    cpu_us = statistics.median(one.cpu_us for one in costs)
    return Row(arm, case.sequences, case.drafts, cpu_us, wall[len(wall) // 10], tokens)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """A line a row, with the peer's time over ours where there is a peer."""
    peers = {(one.sequences, one.drafts): one.cpu_us for one in rows if one.arm == "vllm"}
    head = f"{'sequences':>9} {'drafts':>6}  {'scheduler':<21}{'cpu us':>9}{'wall p10':>10}{'us/seq':>8}{'tokens':>8}"
    lines = [f"{head}  peer"]
    for one in rows:
        peer = peers.get((one.sequences, one.drafts))
        ratio = "" if peer is None or one.arm == "vllm" else f"{peer / one.cpu_us:5.1f} x faster"
        lines.append(
            f"{one.sequences:>9} {one.drafts:>6}  {one.arm:<21}{one.cpu_us:>9.0f}{one.wall_p10_us:>10.0f}"
            f"{one.us_per_sequence:>8.2f}{one.tokens_per_step:>8.2f}  {ratio}"
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; exit status 0, or 2 for too few steps."""
    parser = argparse.ArgumentParser(prog="scheduler bench", description=__doc__.partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=120, help=f"a case, {WARM_STEPS} of them not counted (120)")
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES), metavar="N")
    parser.add_argument("--no-peer", action="store_true", help="measure ours alone")
    asked = parser.parse_args(arguments)
    if asked.steps <= WARM_STEPS or min(asked.sequences) < 1:
        sys.stderr.write(f"--steps = {asked.steps} must exceed {WARM_STEPS}, and --sequences be at least 1\n")
        return 2
    version = None if asked.no_peer else peer_version()
    if version is None and not asked.no_peer:
        sys.stderr.write(HOW_TO_GET + "\n")
    tell: Callable[[str], object] = sys.stderr.write
    rows: list[Row] = []
    for drafts in (0, DRAFTS):
        for sequences in asked.sequences:
            tell(f"{sequences} sequences, {drafts} drafts\n")
            rows += measure(Case(sequences, drafts, asked.steps), version is not None)
    if asked.json:
        sys.stdout.write(json.dumps({"bench": "scheduler", "vllm": version, "rows": list(map(asdict, rows))}) + "\n")
    else:
        sys.stdout.write("\n".join(lines_of(rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
