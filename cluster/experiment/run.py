"""Run an experiment: each trace packed once and shelved, its points replayed in parallel processes."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from shoal.cluster.experiment.manifest import Experiment
from shoal.cluster.experiment.points import Row, points_of, run_point
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.formats import load_trace
from shoal.kvstore.trace.shelf import shelve

Told = Callable[[str, int], None]


def count_points(experiment: Experiment) -> int:
    """Replays of the whole experiment."""
    return len(experiment.traces) * len(points_of(experiment))


def run_experiment(experiment: Experiment, traces: Path, jobs: int, told: Told) -> list[Row]:
    """A row a point, in the manifest's order. `told(what, points done since)` reports progress.

    TraceError if a trace cannot be read or has no blocks. Processes, not Ray tasks: a replay shares one mapped copy of
    its trace with its neighbours on the machine and needs no cluster.
    """
    points = points_of(experiment)
    rows: dict[tuple[int, int], Row] = {}
    with (
        tempfile.TemporaryDirectory(prefix="shoal-traces-") as shelf,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        pending = {}
        for number, choice in enumerate(experiment.traces):
            told(f"reading {choice.name}", 0)
            folder = Path(shelf) / str(number)
            folder.mkdir()
            trace = load_trace(traces / choice.file, choice.block)
            if not len(trace.grains):
                raise TraceError(traces / choice.file, 1, "file", "has no block ids: nothing can be hit")
            shelve(trace, folder)
            for place, point in enumerate(points):
                pending[pool.submit(run_point, choice, folder, point)] = (number, place)
        for done in as_completed(pending):
            rows[pending[done]] = done.result()
            told(f"replaying {rows[pending[done]]['trace']}", 1)
    return [rows[key] for key in sorted(rows)]
