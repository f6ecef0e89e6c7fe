"""Offline generation and the vision runner on the toy checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from shoal.engines.config import Truncation
from shoal.engines.core.request import EngineRequest, FinishEvent, FinishReason, SamplingParams, TokensEvent
from shoal.engines.model.decoder import Model
from shoal.engines.model.images import preprocess
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.generate import generate
from shoal.engines.run.plain import plain_loop
from shoal.engines.run.vision import VisionRunner

PROMPT = tuple(range(40, 90))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_gives_the_plain_loops_tokens(toy: Model, toy_dir: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=4)
    *tokens, finish = list(generate(toy_dir, PROMPT, sampling))
    request = EngineRequest("generate", PROMPT, len(PROMPT), sampling)
    assert tokens == list(plain_loop(WholeSequence(toy), request, {}, Truncation()))
    assert isinstance(finish, FinishEvent)
    assert finish.reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_generate_reports_logprobs(toy_dir: Path) -> None:
    first = next(iter(generate(toy_dir, PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))))
    assert isinstance(first, TokensEvent)
    [told], [token_id] = first.logprobs, first.token_ids
    assert told.top[0] == (token_id, told.token)


def test_generate_refuses_an_empty_prompt(toy_dir: Path) -> None:
    with pytest.raises(ValueError, match="token_ids is empty"):
        list(generate(toy_dir, (), SamplingParams(max_tokens=1)))


def test_vision_rows_fill_their_span_whatever_came_before(toy_dir: Path) -> None:
    runner = VisionRunner.load(toy_dir)
    picture = np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    canvas = preprocess(picture, runner.config.vision)
    rows = runner.encode(canvas)
    assert rows.shape == (runner.span_length(canvas), runner.config.hidden)
    assert bool(torch.isfinite(rows).all())
    runner.encode(np.zeros_like(canvas))
    assert torch.equal(runner.encode(canvas), rows)
    assert not torch.equal(runner.encode(255 - canvas), rows)
