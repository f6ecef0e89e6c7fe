"""Every number of a golden file of hit rates, computed again from its traces through the policy core.

Definitions stand in the file itself. Counts must be equal, rates and times agree to one millionth, means to half of
their last digit. A key that nobody here computes is reported as such: nothing is passed over in silence.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from shoal.kvstore.core.policy.arc import Arc
from shoal.kvstore.core.policy.belady import belady_hits
from shoal.kvstore.core.policy.chained import ChainPolicy, ChainRules, Order
from shoal.kvstore.core.policy.queues import Fifo, Lfu, ObjectPolicy, S3Fifo, Sieve
from shoal.kvstore.trace.formats import load_trace
from shoal.kvstore.trace.packed import Trace
from shoal.kvstore.trace.replay import HitCounts, replay
from shoal.kvstore.trace.reuse import LENGTH_PERCENTILES, PERCENTILES, Reuse, lengths, measure_reuse, percentile

_TOLD = {"input_file", "block_size_tokens", "parse"}  # what was asked, not what was found
_OBJECT_POLICIES: Mapping[str, type[ObjectPolicy]] = {
    "FIFO": Fifo, "LFU": Lfu, "S3FIFO": S3Fifo, "Sieve": Sieve, "ARC": Arc,
}  # fmt: skip
_MEANS = {"mean": 0.005, "mean_live_blocks": 0.05}
RATE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Compared:
    """One number: where it stands in the golden file, what is wanted, and what was found (None: nobody computes it)."""

    path: str
    wanted: object
    found: object

    @property
    def is_match(self) -> bool:
        """Whether both are the same, as exactly as such a number is stated."""
        if isinstance(self.wanted, float) and isinstance(self.found, int | float):
            allowed = _MEANS.get(self.path.rpartition(".")[2], RATE_TOLERANCE)
            return abs(self.wanted - self.found) <= allowed * (1 + 1e-9)
        return type(self.wanted) is type(self.found) and self.wanted == self.found


def check_trace(name: str, entry: Mapping[str, Any], folder: Path) -> Iterator[Compared]:
    """Every number of one trace's entry, as it is computed; TraceError if its file cannot be read."""
    path = folder / entry["input_file"]
    trace = load_trace(path, entry["block_size_tokens"])
    replayer = _Replayer(trace, lambda: load_trace(path, entry["block_size_tokens"], by_model=True), path)
    for key, wanted in entry.items():
        if key not in _TOLD:
            yield from _compare(f"{name}.{key}", wanted, replayer.find(key, wanted))


def _compare(path: str, wanted: object, found: object) -> Iterator[Compared]:
    """Leaf by leaf; texts beside numbers are explanations."""
    if isinstance(wanted, Mapping):
        for key, value in wanted.items():
            if key not in ("definition", "capacity_blocks", "ttl_s"):
                yield from _compare(f"{path}.{key}", value, found.get(key) if isinstance(found, Mapping) else None)
    elif isinstance(wanted, list):
        for at, value in enumerate(wanted):
            label = value.get("capacity_blocks", value.get("ttl_s", at)) if isinstance(value, Mapping) else at
            place = found[at] if isinstance(found, list) and at < len(found) else None
            yield from _compare(f"{path}[{label}]", value, place)
    else:
        yield Compared(path, wanted, found)


class _Replayer:
    """Finds what one trace gives, by key of the golden file; `found` has the shape of what is wanted."""

    def __init__(self, trace: Trace, by_model: Callable[[], Trace], path: Path) -> None:
        self._trace = trace
        self._by_model = by_model
        self._path = path
        self._measured: Reuse | None = None

    def find(self, key: str, wanted: Any) -> object:
        """The value of one key; None if nobody computes it."""
        if key.startswith("object_policies_libcachesim"):
            return {size: self._objects(int(size), names) for size, names in wanted.items() if size.isdecimal()}
        finder = getattr(self, f"_find_{key}", None)
        return None if finder is None else finder(wanted)

    @property
    def _reuse(self) -> Reuse:
        if self._measured is None:
            self._measured = measure_reuse(self._trace)
        return self._measured

    def _find_input_sha256(self, wanted: object) -> object:
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def _find_requests(self, wanted: object) -> object:
        return len(self._trace)

    def _find_block_refs(self, wanted: object) -> object:
        return len(self._trace.grains)

    def _find_unique_blocks(self, wanted: object) -> object:
        return self._trace.grains_max

    def _find_span_s(self, wanted: object) -> object:
        return self._trace.span_us / 1e6

    def _find_input_length(self, wanted: object) -> object:
        return _length_summary(self._trace.input_tokens)

    def _find_output_length(self, wanted: object) -> object:
        return _length_summary(self._trace.output_tokens)

    def _find_infinite(self, wanted: object) -> object:
        return _hits(replay(self._trace, ChainPolicy(ChainRules(), self._trace.grains_max)))

    def _find_infinite_full_blocks_only(self, wanted: object) -> object:
        full = self._trace.input_tokens // self._trace.block_tokens
        return {"block_hit_rate": int(np.minimum(self._reuse.hits_of, full).sum()) / int(full.sum())}

    def _find_infinite_key_includes_model(self, wanted: object) -> object:
        trace = self._by_model()
        return _hits(replay(trace, ChainPolicy(ChainRules(), trace.grains_max)))

    def _find_reuse_gap_since_last_touch_s(self, wanted: object) -> object:
        return _time_summary(self._reuse.gaps)

    def _find_age_since_first_write_s(self, wanted: object) -> object:
        return _time_summary(self._reuse.ages)

    def _find_blocks_never_hit(self, wanted: object) -> object:
        return self._reuse.never_hit

    def _find_top10pct_blocks_share_of_hits(self, wanted: object) -> object:
        return self._reuse.hottest_share

    def _find_lru(self, wanted: list[dict[str, Any]]) -> object:
        return [self._lru(entry["capacity_blocks"]) for entry in wanted]

    def _find_ttl(self, wanted: list[dict[str, Any]]) -> object:
        return [self._ttl(round(entry["ttl_s"] * 1_000_000)) for entry in wanted]

    def _find_object_belady_min(self, wanted: Mapping[str, Any]) -> object:
        return {"hits": {size: belady_hits(self._trace.grains, int(size)) for size in wanted["hits"]}}

    def _lru(self, capacity: int) -> Mapping[str, object]:
        head, tail = (self._chain(ChainRules(capacity=capacity, order=order)) for order in reversed(Order))
        # Block by block, head first: the same leading hits and no others, see core/policy/chained.py.
        return {
            "lru_sequential": _hits(head) | {"object_hits": head.hit_blocks},
            "lru_head_first": _hits(head),
            "lru_tail_first": _hits(tail),
        }

    def _ttl(self, ttl_us: int) -> Mapping[str, object]:
        return {
            name: _hits(self._chain(ChainRules(ttl_us=(ttl_us,), refresh=refresh)))
            for name, refresh in (("ttl_sliding", True), ("ttl_fixed", False))
        }

    def _chain(self, rules: ChainRules) -> HitCounts:
        return replay(self._trace, ChainPolicy(rules, self._trace.grains_max))

    def _objects(self, capacity: int, names: Mapping[str, object]) -> Mapping[str, object]:
        found = {}
        for name in names:
            if name == "LRU":
                found[name] = self._chain(ChainRules(capacity=capacity, order=Order.HEAD_FIRST)).hit_blocks
            elif name in _OBJECT_POLICIES:
                policy = _OBJECT_POLICIES[name](capacity, self._trace.grains_max)
                found[name] = replay(self._trace, policy).object_hits
        return found


def _hits(counts: HitCounts) -> dict[str, object]:
    return {
        "hit_blocks": counts.hit_blocks,
        "block_hit_rate": counts.block_hit_rate,
        "hit_tokens": counts.hit_tokens,
        "token_hit_rate": counts.token_hit_rate,
        "requests_with_hit": counts.requests_with_hit,
        "object_hits": counts.object_hits,
        "peak_live_blocks": counts.live_peak,
        "mean_live_blocks": counts.live_mean,
    }


def _length_summary(tokens: "np.typing.NDArray[np.int64]") -> Mapping[str, object]:
    values = percentile(lengths(tokens), LENGTH_PERCENTILES)
    named = {f"p{share * 100:g}": value for share, value in zip(LENGTH_PERCENTILES, values, strict=True)}
    return {"mean": math.fsum(tokens.tolist()) / max(1, len(tokens))} | named


def _time_summary(counts: Mapping[int, int]) -> Mapping[str, object]:
    values = percentile(counts, PERCENTILES)
    named = {f"p{share * 100:g}": value / 1e6 for share, value in zip(PERCENTILES, values, strict=False)}
    return {"n": sum(counts.values())} | named
