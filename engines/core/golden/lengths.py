"""Replays entries about verification lengths: the choice of rows, its estimators, sizes, and the split on a device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from shoal.engines.config import VerifyMode
from shoal.engines.core.golden.outcome import MalformedError, Outcome, Verdict, differences
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.estimators import ForwardEstimator, SamplerEstimator, StepTimes
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.core.verify.redistribution import redistribute
from shoal.engines.core.verify.sizes import first_size, graph_sizes

Entry = dict[str, Any]
ESTIMATE_TOLERANCE = 1e-6  # relative; the fixtures' estimates are rounded


@dataclass(frozen=True, slots=True)
class HeldDrafts:
    """The drafts of a recorded sequence."""

    drafts: tuple[int, ...]
    accept_rates: tuple[float, ...]
    prev_accept_rates: tuple[float, ...]
    process_count: int
    schedule_count: int
    has_draft_info: bool


def replay_verify(section: str, entry: Entry) -> Verdict:
    """The verdict on one entry of `host`, `estimators` or `device`."""
    replay = {"host": _host, "estimators": _estimators, "device": _device}[section]
    kind, entry_id = f"varlen {section}", str(entry["id"])
    try:
        found = replay(entry)
    except (KeyError, TypeError, ValueError, AssertionError, MalformedError) as error:
        return Verdict(kind, entry_id, Outcome.FAILED, (f"{type(error).__name__}: {error}",))
    return Verdict(kind, entry_id, Outcome.FAILED if found else Outcome.PASSED, tuple(found))


def _host(entry: Entry) -> list[str]:
    held = [
        HeldDrafts(
            tuple(range(one["drafts"])), tuple(one["rates"]), tuple(one["prev_rates"]),
            one["processed"], one["scheduled"], one["fresh_drafts"],
        )
        for one in entry["sequences"]
    ]  # fmt: skip
    curve = StepCurve.of((size, ms) for size, ms in entry["curve"]) if entry["curve"] else None
    drafts = max((len(one.drafts) for one in held), default=0)
    if drafts:
        settings = VerifySettings(VerifyMode.VARLEN, drafts, len(held), curve)
    else:  # nothing to choose among, which our settings say in words
        settings = VerifySettings(VerifyMode.FULL, drafts, max(1, len(held)))
    lengths = VerifyLengths(settings)
    for update in entry["updates"]:
        lengths.feed(StepTimes(*update))
    rows = lengths.choose(held)
    slope_ms, sampler_ms = lengths.corrections(len(held))
    expected = entry["expect"]
    return [
        *differences(expected["seqlens_q"], rows, "seqlens_q"),
        *differences(expected["total_q"], sum(rows), "total_q"),
        *_near(expected["slope_ms_per_token"], slope_ms, "slope_ms_per_token"),
        *_near(expected["sampler_ms"], sampler_ms, "sampler_ms"),
    ]


def _estimators(entry: Entry) -> list[str]:
    found: list[str] = []
    if entry["kind"] == "sampler":
        sampler = SamplerEstimator()
        for index, (value, expected) in enumerate(entry["trace"]):
            sampler.feed(value)
            found += _near(expected, sampler.estimate(), f"value {index}")
    elif entry["kind"] == "forward":
        forward = ForwardEstimator()
        for index, (size, value, expected) in enumerate(entry["trace"]):
            forward.feed(size, value)
            found += _near(expected, forward.estimate(), f"value {index}")
    elif entry["kind"] == "forward_summary":
        # What is fed stands in the note alone: 4990 values, then 10, 4980 and 1 of another size.
        forward = ForwardEstimator()
        for _ in range(4990):
            forward.feed(8, 0.1)
        for count, expected in zip((10, 4980, 1), entry["expect"], strict=True):
            for _ in range(count):
                forward.feed(16, 0.5)
            found += _near(expected, forward.estimate(), f"after {count} more")
    else:
        raise MalformedError(f"estimator kind {entry['kind']}")
    return found


def _device(entry: Entry) -> list[str]:
    confidences = np.array(entry["prev_confidences"], np.float32).reshape(-1, entry["nextn"])
    rows = redistribute(confidences, np.array(entry["remap"]), entry["total_q"])
    return differences(entry["expect_q"], rows.tolist(), "expect_q")


def _near(expected: float | None, got: float | None, path: str) -> list[str]:
    if expected is not None and got is not None and abs(got - expected) <= ESTIMATE_TOLERANCE * max(1.0, abs(expected)):
        return []
    return differences(expected, got, path)


def replay_redistribute(row: Entry) -> Entry:
    """Rows of each sequence after a device gave out a fixed total."""
    confidences = np.array(row["prev_confidences"], np.float32)
    return {"q": redistribute(confidences, np.array(row["remap"]), row["total_q"]).tolist()}


def replay_graph_sizes(row: Entry) -> Entry:
    """Captured sizes, and the one that each total uses."""
    sizes = graph_sizes(row["max_size"], row["interval"])
    return {"sizes": list(sizes), "select": [[rows, first_size(sizes, rows)] for rows, _ in row["select"]]}
