"""One sitting: questions of several sequences through a NORMAL engine, as the service would run them, greedily."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shoal.engines.config import CacheConfig, EngineConfig, Role, Truncation, TruncationMode
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.plan import Accepted
from shoal.engines.core.request import EngineRequest, FinishEvent, FinishReason, ImageSpan, SamplingParams, TokensEvent
from shoal.engines.model.config import ModelConfig, VisionConfig
from shoal.engines.model.decoder import Model
from shoal.engines.model.images import digest, grid_of
from shoal.engines.model.vision import token_grid
from shoal.engines.run.engine import Engine
from shoal.engines.run.load import build_engine
from shoal.engines.run.vision import VisionRunner
from shoal.engines.toy.evaluate.losses import TAIL_TOKENS, Loss, forget, without_engram
from shoal.engines.toy.tasks.sample import Encoded
from torch import Tensor

STEP_TOKENS_MAX = 512
"""Rows of a prefill step, as in manifests/local.yaml: longer prompts are computed in chunks."""
TRUNCATION = Truncation(TruncationMode.COMPACT)
"""As the manifests serve it: decoder layers see the last tokens of a prompt only."""
SPARE_TOKENS = 16
"""A wrong answer may be this much longer than the wanted one before it is cut off."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: prompt ids, image spans with their rows [span length, hidden], tokens an answer may take."""

    prompt: tuple[int, ...]
    spans: tuple[ImageSpan, ...]
    rows: tuple[Tensor, ...]
    outputs_max: int


def question_of(encoded: Encoded, config: ModelConfig, vision: VisionRunner | None) -> Question:
    """The prompt of an encoded sample, its pictures encoded; raises ValueError for pictures without a `vision`."""
    spans = image_spans(encoded, config.vision)
    if spans and vision is None:
        raise ValueError(f"vision = None: the sample has {len(spans)} pictures; give a VisionRunner")
    rows = tuple(vision.encode(canvas) for canvas in encoded.canvases) if vision is not None else ()
    wanted = len(encoded.ids) - encoded.prompt_len
    return Question(tuple(encoded.ids[: encoded.prompt_len].tolist()), spans, rows, wanted + SPARE_TOKENS)


def image_spans(encoded: Encoded, vision: VisionConfig) -> tuple[ImageSpan, ...]:
    """Where each picture's placeholders lie; two pictures may touch."""
    spans: list[ImageSpan] = []
    masked = encoded.image_mask.nonzero()[0].tolist()
    at = 0
    for canvas in encoded.canvases:
        rows, columns = token_grid(grid_of(canvas, vision), vision)
        length = rows * (columns + 1) + 2
        start = masked[at]
        assert masked[at : at + length] == list(range(start, start + length)), f"picture at {start} has no whole span"
        spans.append(ImageSpan(start, length, rows, columns, digest(canvas, vision)))
        at += length
    assert at == len(masked), f"{len(masked)} placeholders for pictures of {at} tokens"
    return tuple(spans)


def sit(model: Model, questions: Sequence[Question], loss: Loss | None = None) -> tuple[tuple[int, ...], ...]:
    """The output tokens of each question, the end token included; all questions run together in one engine.

    With a `loss`, what was lost is gone after every step. Raises ValueError for a question the engine refuses.
    """
    engine, memory = build_engine(without_engram(model) if loss is Loss.ENGRAM else model, config_for(questions))
    for number, question in enumerate(questions):
        _submit(engine, str(number), question, loss)
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(questions))}
    step = 0
    while engine.has_work:
        for event in engine.step(now_us=step).events:
            _note(outputs, event)
        if loss is not None:
            forget(memory, loss)
        step += 1
    return tuple(tuple(tokens) for tokens in outputs.values())


def config_for(questions: Sequence[Question]) -> EngineConfig:
    """A NORMAL engine that holds all questions at once."""
    lengths = [len(q.prompt) + q.outputs_max for q in questions]
    block_tokens = CacheConfig().block_tokens
    blocks = sum(blocks_needed(length, block_tokens) for length in lengths)
    # Id 0 is null, and new prompts wait above the watermark of 0.9: a fifth more keeps clear of it.
    cache = CacheConfig(block_tokens, blocks_count=blocks + blocks // 5 + 3, slots_count=len(lengths) + 1)
    return EngineConfig(
        role=Role.NORMAL,
        max_model_len=max(lengths),
        step_tokens_max=STEP_TOKENS_MAX,
        sequences_max=len(lengths),
        truncation=TRUNCATION,
        cache=cache,
    )


def _submit(engine: Engine, request_id: str, question: Question, loss: Loss | None) -> None:
    length = len(question.prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=question.outputs_max)
    cuts = (length - TAIL_TOKENS,) if loss is not None and length > TAIL_TOKENS else ()
    request = EngineRequest(request_id, question.prompt, length, sampling, question.spans, checkpoints=cuts)
    answer = engine.submit(request, now_us=0)
    if not isinstance(answer, Accepted):
        raise ValueError(answer.reason)
    for span, rows in zip(question.spans, question.rows, strict=True):
        # Two equal pictures of one prompt are one digest: the second is known already.
        engine.image_ready(request_id, span.digest, torch.zeros_like(rows) if loss is Loss.IMAGES else rows)


def _note(outputs: dict[str, list[int]], event: TokensEvent | FinishEvent) -> None:
    if isinstance(event, TokensEvent):
        outputs[event.request_id] += event.token_ids
    elif event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise ValueError(f"question {event.request_id} ended with {event.reason}: {event.detail}")
