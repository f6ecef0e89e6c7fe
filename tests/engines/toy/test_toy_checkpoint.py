"""The random toy: it loads as any other checkpoint, is the same everywhere, and its text behaves like a model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_recipe import (
    ChatCompletionRequest,
    Conversation,
    ConversionOptions,
    DataUrlImageSource,
    DeepseekV41Encoding,
    SpecialTokens,
    UserMessage,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.decoder import Model
from shoal.engines.model.engram import EngramHash, read_tokenizer
from shoal.engines.model.images import grid_of, patches, preprocess
from shoal.engines.model.numerics import Mode
from shoal.engines.model.quant import dequantise_fp8, dequantise_fp8_blocks, dequantise_mxfp4
from shoal.engines.model.vision import VisionEncoder
from shoal.engines.model.weights import Weights, load_model_weights
from shoal.engines.toy.build import write_random
from shoal.engines.toy.initialise import random_weights
from shoal.engines.toy.tokenizer import IMAGE, NOISE_ID, special_tokens
from tokenizers import Tokenizer

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
CASES = json.loads((ORACLE / "chat_cases.json").read_text())


@pytest.fixture(scope="module")
def toy(random_toy: Path) -> Path:
    return random_toy


@pytest.fixture(scope="module")
def config(toy: Path) -> ModelConfig:
    return ModelConfig.from_dir(toy)


@pytest.fixture(scope="module")
def weights(toy: Path, config: ModelConfig) -> Weights:
    return load_model_weights(toy, config)


@pytest.fixture(scope="module")
def model(config: ModelConfig, weights: Weights, toy: Path) -> Model:
    return Model.load(toy, Mode.N1, with_drafter=False)


def test_it_is_a_small_checkpoint_in_the_published_layout(toy: Path, config: ModelConfig, weights: Weights) -> None:
    assert {p.name for p in toy.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(p.stat().st_size for p in toy.iterdir()) < 60_000_000
    assert all(p.stat().st_mode & 0o044 for p in toy.iterdir())
    assert config.text.max_position_embeddings == 8192
    assert (config.ring_tokens, config.keep_min) == (134, 134)
    assert (config.n_prefill_layer, config.candidate_consumers) == (6, (8,))
    assert EngramHash.from_dir(toy, config).rows(
        torch.tensor([5]), torch.tensor([False]), (1,), torch.full((1, 3), -1)
    ).shape == (1, 2, 6)


@pytest.mark.parametrize(
    ("name", "dequantise", "tolerance"),
    [
        ("layers.3.attn.wq_a", dequantise_fp8_blocks, 0.035),
        ("layers.4.engram.embed", dequantise_fp8, 0.035),
        ("mtp.1.ffn.experts.3.w2", dequantise_mxfp4, 0.2),
    ],
)
def test_stored_weights_are_the_drawn_ones(
    toy: Path,
    config: ModelConfig,
    weights: Weights,
    name: str,
    dequantise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tolerance: float,
) -> None:
    """Each of the three weight formats is within its rounding, relative to the weights' spread."""
    drawn = random_weights(config, read_tokenizer(toy))[f"{name}.weight"]
    stored = dequantise(weights[f"{name}.weight"].view(torch.uint8), weights[f"{name}.scale"])
    assert (stored - drawn).abs().mean() < tolerance * drawn.std()


def test_two_draws_are_equal(toy: Path, tmp_path: Path) -> None:
    write_random(tmp_path)
    for file in toy.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_special_tokens_are_where_the_configuration_says(toy: Path, config: ModelConfig) -> None:
    tokenizer = read_tokenizer(toy)
    assert tokenizer.get_vocab_size() == config.text.vocab_size
    for token_id, token in special_tokens().items():
        assert tokenizer.token_to_id(token) == token_id
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert tokenizer.token_to_id(IMAGE) == config.image_token_id
    classes = config.text.engram_compressed_vocab_size
    assert 1400 < classes < config.text.vocab_size, "case variants must share classes"


SPECIAL = SpecialTokens(image=IMAGE)
USER, ASSISTANT, THINK_END = NOISE_ID + 1, NOISE_ID + 2, NOISE_ID + 6
PICTURE = "data:image/png;base64,AAAA"


def conversation_of(case: dict[str, Any]) -> Conversation:
    """One recorded conversation, through the OpenAI-style front end; an image inside a sentence has only the other."""
    if any("images" in m for m in case["messages"]):
        content = case["messages"][0]["content"].replace("<image>", IMAGE)
        message = UserMessage(content, [DataUrlImageSource(PICTURE)], image_token=IMAGE)
        return Conversation([message], thinking_mode=case["thinking"], reasoning_effort=case["reasoning_effort"])
    messages: list[dict[str, Any]] = []
    for message in case["messages"]:
        calls = [{"id": c["id"], "type": "function", "function": c} for c in message.get("tool_calls", [])]
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    body = {"messages": messages, "thinking": {"type": "enabled" if case["thinking"] else "disabled"}}
    if "tools" in case:
        body["tools"] = [{"type": "function", "function": tool} for tool in case["tools"]]
    return converted(body | ({"reasoning_effort": case["reasoning_effort"]} if "reasoning_effort" in case else {}))


def converted(body: dict[str, Any]) -> Conversation:
    request = ChatCompletionRequest(body | {"model": "DeepSeek-V4.1-Flash"})
    return request.convert(ConversionOptions().with_special_tokens(SPECIAL)).conversation


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_chats_encode(toy: Path, case: dict[str, Any]) -> None:
    """deepseek-recipe takes the toy tokenizer as it takes the oracle's, whose ids are recorded."""
    conversation = conversation_of(case)
    encoding = DeepseekV41Encoding().with_special_tokens(SPECIAL)
    assert encoding.render_conversation(conversation).prompt == case["prompt"]
    encoders = {
        directory: encoding.with_tokenizer(RecipeTokenizer.from_file(str(directory / "tokenizer.json")))
        for directory in (ORACLE, toy)
    }
    assert encoders[ORACLE].encode(conversation) == case["token_ids"]
    own = encoders[toy].encode(conversation)
    assert read_tokenizer(toy).decode(own, skip_special_tokens=False) == case["prompt"]
    assert spelled_specials(read_tokenizer(toy), own) == spelled_specials(read_tokenizer(ORACLE), case["token_ids"])


def spelled_specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    specials = set(special_tokens().values())
    return [token for token in map(tokenizer.id_to_token, ids) if token in specials]


def test_an_image_part_is_one_image_token_and_user_text_is_none(toy: Path, config: ModelConfig) -> None:
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    text = {"type": "text", "text": f"{IMAGE} <think> café"}
    conversation = converted(
        {"messages": [{"role": "user", "content": [image, text]}], "thinking": {"type": "disabled"}}
    )
    encoding = DeepseekV41Encoding().with_special_tokens(SPECIAL)
    tokenizer = RecipeTokenizer.from_file(str(toy / "tokenizer.json"))
    ids = encoding.with_tokenizer(tokenizer).encode(conversation)
    rendered = encoding.render_conversation(conversation).prompt
    assert read_tokenizer(toy).decode(ids, skip_special_tokens=False) == rendered
    assert ids.count(config.image_token_id) == 1
    assert [i for i in ids if i in special_tokens()] == [0, USER, config.image_token_id, ASSISTANT, THINK_END]


def prompt(toy: Path, text: str) -> list[int]:
    tokenizer = read_tokenizer(toy)
    return [0, USER, *tokenizer.encode(text).ids, ASSISTANT, THINK_END]


def logits(model: Model, ids: list[int], image_rows: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.tensor(ids) == model.config.image_token_id
    rows = torch.zeros(0, model.config.hidden) if image_rows is None else image_rows
    return model.logits(model.forward_full(torch.tensor(ids), mask, rows).hidden)


def test_greedy_text_is_varied_and_does_not_end_at_once(toy: Path, model: Model) -> None:
    answers = []
    for text in ("What is the capital of France?", "Hello"):
        ids = prompt(toy, text)
        start = len(ids)
        for _ in range(10):
            ids.append(int(logits(model, ids)[-1].argmax()))
        answers.append(ids[start:])
        assert model.config.eos_token_id not in answers[-1]
        assert len(set(answers[-1])) >= 6
    assert answers[0] != answers[1]


def test_activations_routing_and_margins_are_sane(toy: Path, model: Model, weights: Weights) -> None:
    seen: list[torch.Tensor] = []

    class Routes:
        def record(self, name: str, layer: int, value: torch.Tensor) -> None:
            if name == "router_topk":
                seen.append(value)

    ids = torch.from_numpy(np.random.default_rng(3).integers(3, NOISE_ID, 160))
    none, rows = torch.zeros(160, dtype=torch.bool), torch.zeros(0, model.config.hidden)
    out = model.logits(model.forward_full(ids, none, rows, probe=Routes()).hidden)
    assert out.isfinite().all()
    assert out.abs().max() < 40
    for chosen in seen:
        used = torch.bincount(chosen.flatten().long(), minlength=model.config.text.n_routed_experts)
        assert used.max() < 0.45 * used.sum(), "one expert takes nearly all tokens"
        assert (used > 0).sum() >= 6
    assert len(seen) == model.config.n_layers
    exact = Model.load(toy, Mode.N0, with_drafter=False)
    reference = exact.logits(exact.forward_full(ids, none, rows).hidden)
    best = out.topk(2, dim=-1).values
    margin = (best[:, 0] - best[:, 1]).median()
    assert margin > 2 * (out - reference).abs().mean(), "rounding would decide the greedy token"


def test_far_tokens_and_images_change_the_answer(toy: Path, model: Model, weights: Weights) -> None:
    """Otherwise a wrong cache or a wrong picture would go unnoticed."""
    ids = prompt(toy, "The teacher finds the old house. " * 24)
    assert len(ids) > 128 + 40
    other = [*ids[:4], 300, *ids[5:]]
    assert (logits(model, ids)[-20:] - logits(model, other)[-20:]).abs().mean() > 0.05
    encoder = VisionEncoder(model.config, weights)
    pictures = [np.full((90, 120, 3), shade, dtype=np.uint8) for shade in (30, 220)]
    outs = []
    for picture in pictures:
        canvas = preprocess(picture, model.config.vision)
        image = encoder.encode(patches(canvas, model.config.vision), grid_of(canvas, model.config.vision))
        span = [model.config.image_token_id] * len(image)
        outs.append(logits(model, [0, USER, *span, *ids[2:20]], image)[-10:])
    assert (outs[0] - outs[1]).abs().mean() > 0.05
