"""`python -m shoal.engines.toy.evaluate`: examine a checkpoint as the service would run it; tables or JSON."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import CheckpointError
from shoal.engines.model.numerics import Mode
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.evaluate.jobs import Job, Outcome, Settings, jobs, run
from shoal.engines.toy.evaluate.papers import names
from shoal.engines.toy.evaluate.report import Report
from shoal.engines.toy.evaluate.summary import summary_of

BAD_USAGE = 2
INTERRUPTED = 130
MODES = (Mode.N1, Mode.N2)
EXAMPLES = """
examples:
  python -m shoal.engines.toy.evaluate                            everything about the built-in toy
  python -m shoal.engines.toy.evaluate --samples 20 --no-ablations    a quick look
  python -m shoal.engines.toy.evaluate --only recall drafts --seed 7  one task, and drafts over it, on other questions
  python -m shoal.engines.toy.evaluate --model build/toy --json > report.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 0 also when goals are missed, 2 for a mistake of the user, 130 when interrupted."""
    try:
        settings, as_json = read_arguments(arguments)
        work = jobs(settings)
        start = time.monotonic()
        size = ModelConfig.from_dir(settings.directory).text.dspark_block_size
        outcomes = list(_watched(run(settings, work), work))
    except (UsageError, CheckpointError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print("evaluate: interrupted", file=sys.stderr)
        return INTERRUPTED
    report = Report(settings, summary_of(outcomes, size), time.monotonic() - start)
    if as_json:
        print(report.to_json())
    else:
        report.write(sys.stdout)
    return 0


class UsageError(ValueError):
    """An argument that cannot be used: the text names it, its value, the rule and the remedy."""


def read_arguments(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """What the command line asks for, and whether as JSON; raises UsageError."""
    given = _parser().parse_args(arguments)
    unknown = [name for name in given.only if name not in names()]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: no such task; name any of {', '.join(names())}")
    if given.samples < 1:
        raise UsageError(f"--samples {given.samples}: must be at least 1; 100 is the default")
    if given.seed < 0:
        raise UsageError(f"--seed {given.seed}: must be at least 0; any other number gives other questions")
    if given.workers < 1:
        raise UsageError(f"--workers {given.workers}: must be at least 1; one for each core is best")
    directory = given.model or ensure_toy()
    if not (directory / "config.json").is_file():
        raise UsageError(f"--model {directory}: must hold config.json; give a checkpoint directory, or leave it out")
    settings = Settings(
        directory=directory.resolve(),
        mode=Mode(given.mode),
        seed=given.seed,
        samples=given.samples,
        only=tuple(given.only),
        with_losses=given.ablations,
        workers=given.workers,
    )
    return settings, given.json


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shoal.engines.toy.evaluate",
        description="Examine a checkpoint over the served path: accuracy, what each cached kind is worth, drafts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="which questions are asked (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory (default: the built-in toy)")
    parser.add_argument(
        "--samples", type=int, default=100, metavar="N", help="questions a paper; long ones get fewer (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TASK", help=f"some of: {', '.join(names())}")
    parser.add_argument(
        "--ablations", action=argparse.BooleanOptionalAction, default=True, help="ask again with one cached kind lost"
    )
    parser.add_argument(
        "--mode",
        choices=[str(m) for m in MODES],
        default=str(Mode.N1),
        help="n1 as served (default), n2 with FP8 inputs",
    )
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="processes (%(default)s)"
    )
    return parser


def _watched(outcomes: Iterable[Outcome], work: Sequence[Job]) -> Iterator[Outcome]:
    """The outcomes, with a bar on standard error while they come, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("questions", total=sum(len(job.indices) for job in work))
        for outcome in outcomes:
            bar.update(task, advance=len(outcome.job.indices), description=f"questions ({outcome.job.paper})")
            yield outcome


if __name__ == "__main__":
    sys.exit(main())
