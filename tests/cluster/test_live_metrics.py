"""Counters of engines on their way to Prometheus text: steps, counts, series; engines that do not answer."""

import asyncio

from ray.exceptions import ActorDiedError
from shoal.cluster.api.metrics import merge_metrics
from shoal.cluster.live import metrics
from shoal.cluster.live.metrics import ask_counters, counters_text
from shoal.cluster.live.rates import DraftCounts
from shoal.engines.run.output import NO_DRAFTS, DraftTotals


class Engine:
    """A handle that answers its counters, late, or dies."""

    def __init__(self, counts):
        self.counters = self
        self._counts = counts

    async def remote(self):
        if isinstance(self._counts, Exception):
            raise self._counts
        if self._counts is None:
            await asyncio.Event().wait()
        return self._counts


def test_steps_add_up_to_series_with_vllms_names():
    drafts = DraftCounts()
    drafts.add((2, 2, 1), (2, 1, 0), DraftTotals(made=10, sequences=2, verified=8, accepted=3))
    drafts.add((1,), (1,), DraftTotals(made=5, sequences=1, verified=2, accepted=1))
    drafts.add((), (), NO_DRAFTS)
    text = counters_text("m", {"decode/1": drafts.counts(), "decode/0": {"grains_dropped": 7}})
    labels = 'model_name="m",engine="decode/1"'
    lines = text.splitlines()
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 3",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 10",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 4",
        f"shoal:spec_decode_num_made_tokens_total{{{labels}}} 15",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 3',
        f'shoal:spec_decode_num_judged_tokens_per_pos_total{{{labels},position="2"}} 1',
        'shoal:grains_dropped_total{model_name="m",engine="decode/0"} 7',
        "# TYPE vllm:spec_decode_num_draft_tokens_total counter",
    ):
        assert line in lines
    assert len(lines) == len(set(lines)), "a header or series stands twice"
    assert sorted(merge_metrics(text).splitlines()) == sorted(lines)


async def test_an_engine_that_does_not_answer_is_left_out(monkeypatch):
    monkeypatch.setattr(metrics, "ASK_S", 0.02)
    engines = {"decode/0": Engine({"a": 1}), "decode/1": Engine(ActorDiedError()), "prefill/0": Engine(None)}
    assert await ask_counters(engines) == {"decode/0": {"a": 1}}
    assert counters_text("m", {}) == ""
