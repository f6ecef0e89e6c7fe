"""Train the toy model: `python -m shoal.engines.toy.training --out DIR`; a second call goes on where the first stopped.

One GPU trains the whole course in about half an hour; a CPU runs it too, for those who want to read along.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tokenizer import toy_tokenizer
from shoal.engines.toy.training import fused
from shoal.engines.toy.training.course import COURSE
from shoal.engines.toy.training.examples import batches
from shoal.engines.toy.training.loop import Hooks, train
from shoal.engines.toy.training.stacks import Stacks
from shoal.engines.toy.training.stages import Stage
from shoal.engines.toy.training.state import STATE, Place, export, load_state, save_state, start
from shoal.engines.toy.training.step import Learner

EXAMPLES = """examples:
  python -m shoal.engines.toy.training --out run            the whole course
  python -m shoal.engines.toy.training --out run --minutes 9   stop after 9 minutes; call again to go on
  python -m shoal.engines.toy.training --out run --from engines/toy/weights --stage drafter   one stage alone
  python -m shoal.engines.toy.training --out run --from engines/toy/weights --stage long drafter   the last two
"""


def main(arguments: list[str]) -> int:
    """Run (the rest of) the course; write the state and the served checkpoint into the directory."""
    options = parser().parse_args(arguments)
    begun = time.monotonic()
    torch.set_float32_matmul_precision("high")
    if options.compile:
        fused.COMPILED_ON.add(options.device)
    device, told = torch.device(options.device), tell(begun)
    config = toy_config(toy_tokenizer())
    stages = [stage for stage in COURSE if not options.stage or stage.name in options.stage]
    learner = Learner(config, Stacks(config, start(config, options.seed, options.checkpoint), device))
    place = Place()
    if (options.out / STATE).is_file():
        learner.optimiser.state, place = load_state(options.out, learner.stacks, device)
    until = begun + 60 * options.minutes
    while place.stage < len(stages) and time.monotonic() < until:
        place = run(learner, stages, place, options, Clock(until, told))
        told(f"wrote {options.out / 'checkpoint'}")
    left = (
        f"stopped in stage {stages[place.stage].name}, step {place.step}" if place.stage < len(stages) else "complete"
    )
    told(left)
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """When a run stops (time.monotonic), and where it tells its lines."""

    until: float
    tell: Callable[[str], None]


def run(learner: Learner, stages: Sequence[Stage], place: Place, options: argparse.Namespace, clock: Clock) -> Place:
    """One stage from its place on, saved now and then and at its end; the place after it."""
    stage = resized(stages[place.stage], options.rows, options.steps)

    def keep(done: int) -> Place:
        reached = Place(place.stage, done) if done < stage.steps else Place(place.stage + 1)
        save_state(options.out, learner.stacks, learner.optimiser.state, reached)
        return reached

    steps = batches(learner.config, stage, options.seed, options.workers, place.step)
    done = train(learner, stage, steps, place.step, clock.until, Hooks(clock.tell, keep))
    export(options.out / "checkpoint", learner.config, learner.stacks.floats())
    return keep(done)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the state and the checkpoint")
    parser.add_argument("--from", dest="checkpoint", type=Path, help="served checkpoint to begin with; default: drawn")
    names = [stage.name for stage in COURSE]
    parser.add_argument("--stage", nargs="+", choices=names, help="these stages alone, in the course's order")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many; default: never")
    parser.add_argument("--seed", type=int, default=1, help="of weights and samples; default 1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make samples; default 14")
    parser.add_argument("--rows", type=int, help="rows of a step, in place of the course's: for a small machine")
    parser.add_argument("--steps", type=int, help="steps of every stage, in place of the course's")
    parser.add_argument("--compile", action="store_true", help="compile element-wise steps on a CPU too")
    return parser


def resized(stage: Stage, rows: int | None, steps: int | None) -> Stage:
    """The stage with fewer rows a step, or another number of steps."""
    if rows is not None:
        stage = dataclasses.replace(stage, pack_rows=rows, packs=1)
    return stage if steps is None else dataclasses.replace(stage, steps=steps)


def tell(begun: float) -> Callable[[str], None]:
    """Prints a line with the time since the start."""

    def line(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - begun:7.1f} s  {text}\n")
        sys.stdout.flush()

    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
