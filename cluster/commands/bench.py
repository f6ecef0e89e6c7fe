"""`shoal bench NAME`: measure one part on this machine, against a peer in the same run where there is one."""

import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, cast

import typer


class Bench(NamedTuple):
    """A benchmark: the module whose `main(arguments) -> exit status` runs it, and what it measures."""

    module: str
    phrase: str


# Modules are imported when they are asked for: each brings the libraries of its own part.
BENCHES: dict[str, Bench] = {
    "determinism": Bench("shoal.engines.toy.determinism_bench", "what draws that drafts cannot change cost"),
    "engine": Bench(
        "shoal.engines.toy.engine_bench",
        "tokens per second of one engine: drafts, all verified or as many as pay, against none",
    ),
    "experts": Bench("shoal.engines.experts_bench", "balance of experts over ranks, against the published policy"),
    "scheduler": Bench("shoal.engines.run.scheduler_bench", "planning and committing decode steps, against vLLM's"),
    "store": Bench("shoal.kvstore.bench", "coding, put and fetch, against ISA-L, plain files and memcpy"),
    "transfer": Bench("shoal.cluster.live.transfer_bench", "a hand-off's transfer, against raw NIXL and memcpy"),
    "verify": Bench("shoal.engines.run.verify_bench", "what verifying fewer drafts pays, against DeepSeek's table"),
    "verify-group": Bench(
        "shoal.engines.run.verify_group_bench", "one choice of rows for all ranks of an expert group"
    ),
    "verify-time": Bench("shoal.engines.run.verify_time", "time of one choice of verification lengths"),
}

_HELP = (
    "Measure one part on this machine: NAME is one of "
    + "; ".join(f"{name} ({one.phrase})" for name, one in sorted(BENCHES.items()))
    + ". Further options go to that benchmark. Examples: shoal bench verify. Example: shoal bench scheduler --json. "
    "Example: shoal bench scheduler --steps 50."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Which benchmark.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def bench(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Run one benchmark of the table and exit with its status. Example: shoal bench verify --json."""
    if name not in BENCHES:
        typer.echo(f"bench {name}: no such benchmark; there are {', '.join(sorted(BENCHES))}", err=True)
        raise typer.Exit(2)
    main = main_of(name)
    raise typer.Exit(main([*(["--json"] if as_json else []), *context.args]))


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    """The command line of a benchmark of the table; imports its module."""
    return cast(Callable[[Sequence[str]], int], importlib.import_module(BENCHES[name].module).main)


def register(app: typer.Typer) -> None:
    """Add the command; options that are not its own are the benchmark's."""
    app.command(help=_HELP, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
