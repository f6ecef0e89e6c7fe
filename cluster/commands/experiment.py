"""`shoal experiment MANIFEST` replays traces and draws hit rates; `--check FILE` compares with a golden file."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from shoal.cluster.errors import ShoalError
from shoal.cluster.experiment.manifest import read_experiment
from shoal.cluster.experiment.report import write_report
from shoal.cluster.experiment.run import count_points, run_experiment
from shoal.kvstore.errors import StoreError
from shoal.kvstore.trace.golden import Compared, check_trace

TracesDir = Annotated[Path | None, typer.Option("--traces", help="Folder of the traces (default: beside the file).")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Processes at once (default: one a core).")]


def experiment(
    manifest: Annotated[Path | None, typer.Argument(metavar="[MANIFEST]", help="A file of kind Experiment.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="A golden file of hit rates to compare with.")] = None,
    traces: TracesDir = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("results"),
    jobs: Jobs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Replay traces. Example: shoal experiment manifests/experiments/ttl-hit-rate.yaml --traces DIR."""
    given = [path for path in (manifest, check) if path is not None]
    if len(given) != 1:
        typer.echo("give either a MANIFEST or --check FILE", err=True)
        raise typer.Exit(2)
    folder = traces or given[0].parent
    workers = jobs or os.cpu_count() or 1
    try:
        if check is not None:
            _check(check, folder, workers, as_json)
        else:
            _run(given[0], folder, out, workers, as_json)
    except (ShoalError, StoreError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _run(path: Path, folder: Path, out: Path, jobs: int, as_json: bool) -> None:
    asked = read_experiment(path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=count_points(asked))
        told = lambda what, done: progress.update(task, description=what, advance=done)  # noqa: E731
        rows = run_experiment(asked, folder, jobs, told)
    paths = write_report(asked.name, path.read_text(encoding="utf-8"), rows, out)
    if as_json:
        typer.echo(json.dumps({"rows": rows, "files": [str(p) for p in paths]}))
        return
    for row in rows:
        limit = row["ttl"] or (f"{row['capacity_grains']:,} grains" if row["capacity_grains"] else "")
        rates = f"{100 * float(row['block_hit_rate']):6.2f} % of blocks"
        typer.echo(f"{row['trace']:<24} {row['policy']:<15} {limit:>15} {rates}")
    typer.echo("\n".join(f"wrote {p}" for p in paths))


def _check(path: Path, folder: Path, jobs: int, as_json: bool) -> None:
    entries = _golden(path)
    found: list[Compared] = []
    with ProcessPoolExecutor(min(jobs, len(entries))) as pool:
        asked = {name: pool.submit(_check_one, name, entry, folder) for name, entry in entries.items()}
        for name, pending in asked.items():
            compared = pending.result()
            found += compared
            if not as_json:
                equal = sum(one.is_match for one in compared)
                typer.echo(f"{name}: {equal} of {len(compared)} numbers match", color=None)
                for one in compared:
                    if not one.is_match:
                        typer.echo(f"  differs: {one.path} is {one.found}, golden {one.wanted}")
    if as_json:
        rows = [{"path": c.path, "golden": c.wanted, "found": c.found, "match": c.is_match} for c in found]
        typer.echo(json.dumps(rows))
    if not all(one.is_match for one in found):
        raise typer.Exit(1)


def _check_one(name: str, entry: dict[str, Any], folder: Path) -> list[Compared]:
    return list(check_trace(name, entry, folder))


def _golden(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ShoalError(f"{path}: cannot be read as a golden file: {error}") from None
    entries = tree.get("traces")
    fields = ("input_file", "block_size_tokens")
    if not isinstance(entries, dict) or not entries:
        raise ShoalError(f"{path}: traces must be a mapping of names to what was found on each; see its README")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or any(field not in entry for field in fields):
            raise ShoalError(f"{path}: traces.{name} must give {' and '.join(fields)}")
    return entries
