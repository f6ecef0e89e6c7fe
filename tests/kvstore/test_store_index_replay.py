"""The live index, asked and filled request by request, hits what a replay of the trace through its policy hits."""

from pathlib import Path

import pytest
from shoal.kvstore.config import IndexConfig, TtlConfig
from shoal.kvstore.core.index import StoreIndex
from shoal.kvstore.core.policy.chained import ChainPolicy, ChainRules
from shoal.kvstore.core.records import Kind, StripeRecord, TableEntry, TrafficClass
from shoal.kvstore.trace.formats import load_trace
from shoal.kvstore.trace.replay import replay

TRACE = Path(__file__).resolve().parent.parent / "data" / "traces" / "mooncake_conversation_trace.jsonl.gz"
NEVER_US = 1 << 50


def live_hits(index: StoreIndex, trace) -> list[int]:
    """Leading hits of each request; every grain that was missing is written as a stripe of one byte."""
    hits, number = [], 0
    for chain, now_us in zip(trace.chains(), trace.times_us.tolist(), strict=True):
        keys = [int(grain + 1).to_bytes(16) for grain in chain]
        found = index.match(keys, 0, now_us, TrafficClass.CHAT).grains_matched
        hits.append(found)
        for at in range(found, len(keys)):
            number += 1
            parent = keys[at - 1] if at else bytes(16)
            entry = TableEntry(Kind.GRAIN, keys[at], parent, at, TrafficClass.CHAT, 0, 1, bytes(16))
            index.insert(StripeRecord(number.to_bytes(16), 1, 1, 1, 1, 1, now_us, (None, None), (entry,)), now_us)
    return hits


@pytest.mark.parametrize(
    ("capacity", "ttl_us", "age_us"),
    [(700, NEVER_US, NEVER_US), (1 << 40, 30_000_000, NEVER_US), (1_500, 60_000_000, 90_000_000)],
)
def test_live_hits_are_the_replays(capacity: int, ttl_us: int, age_us: int) -> None:
    trace = load_trace(TRACE)
    config = IndexConfig(capacity, TtlConfig(ttl_us, ttl_us, ttl_us, age_us))
    rules = ChainRules(capacity=capacity, ttl_us=(ttl_us - 1,), age_max_us=age_us - 1)
    replayed = replay(trace, ChainPolicy(rules, trace.grains_max))
    assert live_hits(StoreIndex(config, "boot7"), trace) == replayed.hits_of.tolist()
    assert 0 < replayed.hit_blocks < replay(trace, ChainPolicy(ChainRules(), trace.grains_max)).hit_blocks
