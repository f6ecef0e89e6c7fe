"""The manifest of kind `Experiment`: which traces, times to live, capacities and policies are compared."""

from pathlib import Path
from typing import Literal

from msgspec import Struct
from shoal.cluster.errors import ManifestError, Problem
from shoal.cluster.manifest_text import convert, read_yaml
from shoal.cluster.quantities import Duration
from shoal.kvstore.core.records import TrafficClass

PolicyName = Literal["lru", "lru_head_first", "second_touch", "fifo", "s3fifo", "arc", "sieve", "lfu"]


class TraceChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """One trace: its file (looked for in `--traces`), its class of traffic, and the tokens of a block."""

    name: str
    file: str
    traffic: TrafficClass
    block: int


class Experiment(Struct, frozen=True, forbid_unknown_fields=True):
    """What is compared. `capacity` counts grains of the trace's block; `second_touch` is the window of that policy."""

    kind: Literal["Experiment"]
    name: str
    traces: list[TraceChoice]
    ttl: list[Duration]
    capacity: list[int]
    policies: list[PolicyName]
    second_touch: Duration = Duration.parse("1d")


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file; a ManifestError names every broken rule."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem("file", path, f"cannot be read: {error}", "check it")
        raise ManifestError(str(path), (problem,)) from None
    return decode_experiment(text, str(path))


def decode_experiment(text: str, file: str) -> Experiment:
    """The experiment in `text`; `file` names it in messages."""
    tree = read_yaml(text, file)
    if tree.get("kind") != "Experiment":
        rule = Problem("kind", tree.get("kind"), "must be Experiment", "this command reads experiments")
        raise ManifestError(file, (rule,))
    experiment = convert(tree, Experiment, file)
    if found := _problems(experiment):
        raise ManifestError(file, found)
    return experiment


def _problems(experiment: Experiment) -> tuple[Problem, ...]:
    found = []
    if not experiment.traces:
        found.append(Problem("traces", "[]", "must name a trace", "add name, file, traffic and block"))
    names = [trace.name for trace in experiment.traces]
    for at, trace in enumerate(experiment.traces):
        if trace.block < 1:
            found.append(Problem(f"traces[{at}].block", trace.block, "must be at least 1", "128 is a grain"))
        if Path(trace.file).name != trace.file:
            rule = "must be a file's name without a folder"
            found.append(Problem(f"traces[{at}].file", trace.file, rule, "give the folder by --traces"))
        if names.count(trace.name) > 1:
            found.append(Problem(f"traces[{at}].name", trace.name, "stands twice", "give each trace its own name"))
    for at, ttl_us in enumerate(experiment.ttl):
        if ttl_us < 1:
            found.append(Problem(f"ttl[{at}]", ttl_us, "must be more than 0", "write for example 5m"))
    for at, capacity in enumerate(experiment.capacity):
        if capacity < 20:
            found.append(Problem(f"capacity[{at}]", capacity, "must be at least 20 grains", "write for example 10000"))
    if experiment.second_touch < 1:
        found.append(Problem("second_touch", experiment.second_touch, "must be more than 0", "1d is usual"))
    if not experiment.ttl and not (experiment.capacity and experiment.policies):
        found.append(Problem("ttl", "[]", "leaves nothing to compare", "give ttl, or capacity and policies"))
    return tuple(found)
