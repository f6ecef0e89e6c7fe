"""Replays pipelined decode: what a step planned behind an open one is told, and what the device makes of it."""

from typing import Any

import numpy as np
from shoal.engines.core.golden.outcome import differences
from shoal.engines.core.plan import Event, Plan, StepResult
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.verify.redistribution import redistribute
from shoal.engines.core.zos_device import correct_lengths, gather_tokens
from shoal.engines.core.zos_remap import remap_plans, remap_rows

Entry = dict[str, Any]


def advance_pipeline(
    scheduler: StepScheduler, previous: tuple[Plan, StepResult], plan: Plan
) -> tuple[Plan, Entry, tuple[Event, ...]]:
    """Correct a plan on the device, commit the step before, and fix the plan up.

    Returns the plan to sample, what the schema lists under `zos`, and the events of the step before.
    """
    before, result = previous
    drafts = scheduler.rules.drafts
    remap = remap_plans(before, plan, len(plan.items), drafts)
    rows = None
    if remap is not None and drafts:
        index, q = np.array(remap.previous), np.array(remap.q)
        if scheduler.chooses_rows:
            q = redistribute(np.array(result.confidences, dtype=np.float32), index, plan.rows)
        accepted = np.array([len(one) for one in result.accepted])
        k = correct_lengths(np.array(remap.base), q, index, accepted, drafts).tolist()
        rows = q.tolist()
    events = scheduler.commit(before, result, now_us=0)
    fixed = scheduler.fix_up(plan, rows)
    if remap is None:
        return fixed, {}, events
    lengths = [item.end for item in fixed.items]
    if rows is not None:
        # A sequence that ended meanwhile has fewer tokens than the device computed with.
        for item, length in zip(fixed.items, k, strict=True):
            assert item.sequence.is_finished or item.end == length, f"{item.request_id}: {item.end} is not {length}"
    return fixed, describe_correction(remap.previous, remap.base, fixed, lengths), events


def describe_correction(previous: tuple[int, ...], base: tuple[int, ...], fixed: Plan, lengths: list[int]) -> Entry:
    """A correction as the schema writes it."""
    return {
        "remap": list(previous),
        "k_base": list(base),
        "q_corrected": [item.rows for item in fixed.items],
        "k_corrected": lengths,
        "draft_read_slots": [item.read_slot for item in fixed.items],
    }


def replay_remap(entry: Entry) -> list[str]:
    """What is uploaded for one step; a placeholder is nobody's sequence."""
    previous = [object() if one == "placeholder" else one for one in entry["previous"]]
    current = [(one["seq_id"], one["q"], one["k"]) for one in entry["current"]]
    config = entry["config"]
    remap = remap_rows(previous, current, config["rows_with_padding"], config["nextn"])
    got: Entry = {"overlap": remap is not None}
    if remap is not None:
        got |= {"remap": remap.previous, "q": remap.q, "k_base": remap.base}
    return differences(entry["expect"], got, "expect")


def replay_device(entry: Entry) -> list[str]:
    """Rows spread, lengths corrected and tokens gathered from the results of the step before."""
    before, current, drafts = entry["previous"], entry["current"], entry["config"]["nextn"]
    index = np.array([one["remap"] for one in current])
    confidences = np.array(before["confidences"], dtype=np.float32)
    q = redistribute(confidences, index, entry["config"]["total_q"])
    base = np.array([one["k_base"] for one in current])
    k = correct_lengths(base, q, index, np.array(before["num_accepted"]), drafts)
    fresh = [one.get("fresh", ()) for one in current]
    ids = gather_tokens(q, index, np.array(before["sampled"]), np.array(before["predicted"]), fresh)
    got = {
        "q": q.tolist(),
        "k": k.tolist(),
        "input_ids": ids.tolist(),
        "positions": [list(range(end - rows, end)) for rows, end in zip(q.tolist(), k.tolist(), strict=True)],
    }
    return differences(entry["expect"], got, "expect")
