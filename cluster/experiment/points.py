"""The points of an experiment, one replay each, and what one replay gives as a row of the results."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.experiment.manifest import Experiment, PolicyName, TraceChoice
from shoal.cluster.quantities import Duration
from shoal.kvstore.core.policy.arc import Arc
from shoal.kvstore.core.policy.chained import ChainPolicy, ChainRules, Order
from shoal.kvstore.core.policy.queues import Fifo, Lfu, ObjectPolicy, S3Fifo, Sieve
from shoal.kvstore.core.policy.verbs import Policy
from shoal.kvstore.trace.replay import replay
from shoal.kvstore.trace.shelf import take_down

Row = dict[str, str | int | float]
_OBJECTS: Mapping[str, type[ObjectPolicy]] = {"fifo": Fifo, "lfu": Lfu, "sieve": Sieve, "s3fifo": S3Fifo, "arc": Arc}
UNLIMITED, SLIDING, FIXED = "unlimited", "ttl_sliding", "ttl_fixed"


@dataclass(frozen=True, slots=True)
class Point:
    """One replay: a policy with its time to live or capacity (0: no such limit)."""

    policy: str
    ttl_us: int = 0
    capacity: int = 0
    second_touch_us: int = 0


def points_of(experiment: Experiment) -> list[Point]:
    """Every point that each trace is replayed at, the unlimited cache first."""
    found = [Point(UNLIMITED)]
    found += [Point(kind, int(ttl_us)) for kind in (SLIDING, FIXED) for ttl_us in experiment.ttl]
    for name in experiment.policies:
        window_us = int(experiment.second_touch) if name == "second_touch" else 0
        found += [Point(name, 0, capacity, window_us) for capacity in experiment.capacity]
    return found


def run_point(choice: TraceChoice, folder: Path, point: Point) -> Row:
    """Replay the trace shelved in `folder`; the figures of one row."""
    trace = take_down(folder)
    began = time.process_time()
    policy = _policy(point, trace.grains_max)
    counts = replay(trace, policy)
    took_s = time.process_time() - began
    tracked = policy.tracked_bytes / trace.grains_max if isinstance(policy, ChainPolicy) else 0.0
    return {
        "trace": choice.name,
        "traffic": choice.traffic.value,
        "composed": trace.is_composed,
        "policy": point.policy,
        "ttl": str(Duration(point.ttl_us)) if point.ttl_us else "",
        "ttl_us": point.ttl_us,
        "capacity_grains": point.capacity,
        "block_tokens": trace.block_tokens,
        "requests": len(trace),
        "blocks": counts.blocks,
        "hit_blocks": counts.hit_blocks,
        "object_hits": counts.object_hits,
        "block_hit_rate": counts.block_hit_rate,
        "token_hit_rate": counts.token_hit_rate,
        "live_peak": counts.live_peak,
        "live_mean": counts.live_mean,
        "references_per_s": counts.blocks / max(took_s, 1e-9),
        "bytes_per_grain": tracked,
    }


def _policy(point: Point, grains_max: int) -> Policy:
    name: PolicyName | str = point.policy
    if name in _OBJECTS:
        return _OBJECTS[name](point.capacity, grains_max)
    ttl_us = (point.ttl_us,) if point.ttl_us else ()
    order = Order.HEAD_FIRST if name == "lru_head_first" else Order.TAIL_FIRST
    rules = ChainRules(
        capacity=point.capacity or None,
        order=order,
        ttl_us=ttl_us,
        refresh=name != FIXED,
        second_touch_us=point.second_touch_us or None,
    )
    return ChainPolicy(rules, grains_max)
