"""Replays entries about experts: the published placement, numbers of extra places, times of rearrangement, moe_lb."""

from typing import Any

import numpy as np
from shoal.engines.core.experts.placement import extra_places
from shoal.engines.core.experts.published import solve_published
from shoal.engines.core.experts.statistics import BalanceMeter
from shoal.engines.core.experts.timing import Counting, Timing, TimingConfig
from shoal.engines.core.golden.outcome import differences

Entry = dict[str, Any]
COUNTING = {
    "prompt_or_completion": Counting.EVERY_STEP,
    "normal": Counting.DECODE,
    "normal_after_prefill": Counting.AFTER_PREFILL,
}


def replay_eplb(entry: Entry) -> list[str]:
    """The published policy's tables."""
    tokens, config = np.array(entry["tokens"]), entry["config"]
    extra = config["physical"] - tokens.shape[2]
    placement = solve_published(tokens, config["physical"] // config["per_rank"], extra)
    placement.check(allows_twins=True)
    got = {
        "physical_to_logical": placement.experts.tolist(),
        "logical_to_physical": placement.places.tolist(),
        "replicas": placement.counts.tolist(),
    }
    return differences(entry["expect"], got, "expect")


def replay_eplb_extra(row: Entry) -> Entry:
    """Extra places of a group."""
    return {"extra": extra_places(row["routed"], row["minimum"], row["ep"])}


def replay_eplb_schedule(row: Entry) -> Entry:
    """Steps after which the experts are rearranged; the window does not matter for when."""
    timing = Timing(TimingConfig(1, row["interval"], COUNTING[row["engine"]]), ranks=2)
    ticks = [timing.step(is_prefill=letter == "p") for letter in row["steps"]]
    return {"rearrange_at": [index for index, tick in enumerate(ticks) if tick.rearranges]}


def replay_moe_lb(entry: Entry) -> list[str]:
    """The balance of ranks' tokens."""
    meter = BalanceMeter()
    meter.add(np.moveaxis(np.array(entry["tokens"]), 0, -1))
    got = {"mean_sum": meter.mean_sum, "max_sum": meter.max_sum, "moe_lb": meter.moe_lb}
    return differences(entry["expect"], got, "expect")


ROW_REPLAYS = {"eplb_extra": replay_eplb_extra, "eplb_schedule": replay_eplb_schedule}
ENTRY_REPLAYS = {"eplb": replay_eplb, "moe_lb": replay_moe_lb}
