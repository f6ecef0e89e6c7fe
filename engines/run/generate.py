"""Offline generation: one prompt through a NORMAL engine in this process, token by token."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.engines.config import CacheConfig, EngineConfig, Role
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.plan import Accepted
from shoal.engines.core.request import EngineRequest, FinishEvent, SamplingParams, TokensEvent
from shoal.engines.run.load import build_engine, load_model

STEP_TOKENS_MAX = 512


def generate(
    model_path: Path, prompt_ids: Sequence[int], sampling: SamplingParams, drafts: int = 0
) -> Iterator[TokensEvent | FinishEvent]:
    """Output tokens of one prompt as they are computed, then one FinishEvent.

    The engine gets just the memory that this request needs. Prefill is not truncated. Raises ConfigError or
    WeightsError for a bad checkpoint, ValueError for a prompt the engine refuses or more drafts than the model makes
    (the text says why).
    """
    config = config_for(len(prompt_ids), sampling.max_tokens, drafts)
    engine, _ = build_engine(load_model(model_path, with_drafter=drafts > 0), config)
    answer = engine.submit(EngineRequest("generate", tuple(prompt_ids), len(prompt_ids), sampling), now_us=0)
    if not isinstance(answer, Accepted):
        raise ValueError(answer.reason)
    step = 0
    while engine.has_work:
        yield from engine.step(now_us=step).events
        step += 1


def config_for(prompt_tokens: int, outputs_max: int, drafts: int = 0) -> EngineConfig:
    """A NORMAL engine for one request of so many tokens."""
    length = max(prompt_tokens, 1) + outputs_max
    block_tokens = CacheConfig().block_tokens
    # Id 0 of both pools is null, and a pool may not run into the watermark: twice the blocks of the sequence.
    blocks_count = 2 * blocks_needed(length + drafts, block_tokens) + 2
    cache = CacheConfig(block_tokens, blocks_count, slots_count=2)
    return EngineConfig(
        role=Role.NORMAL,
        max_model_len=length,
        step_tokens_max=STEP_TOKENS_MAX,
        sequences_max=1,
        cache=cache,
        drafts=drafts,
    )
