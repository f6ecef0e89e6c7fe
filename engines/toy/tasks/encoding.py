"""A sample as token ids, as the service makes them: the prompt through deepseek-recipe, then the wanted answer."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialTokens,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer
from numpy.typing import NDArray
from shoal.engines.model.config import VisionConfig
from shoal.engines.model.images import layout, preprocess
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tasks.rendering import DSML, THINK_END, answer_pieces, parse_answer
from shoal.engines.toy.tasks.sample import Answer, Encoded, Sample
from shoal.engines.toy.tokenizer import BOS, EOS, IMAGE, IMAGE_ID, special_tokens, toy_tokenizer
from tokenizers import Tokenizer

_ALIAS = "toy"  # the one model name that conversion sees
_ASSISTANT = "<｜Assistant｜>"


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """What encoding and decoding need, made once a process: `Codec.of(toy_tokenizer())`."""

    tokenizer: Tokenizer
    vision: VisionConfig
    encoding: Any
    options: Any
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None = None) -> "Codec":
        """The codec of a tokenizer of the toy's layout (default: the toy's)."""
        tokenizer = tokenizer if tokenizer is not None else toy_tokenizer()
        vision = toy_config(tokenizer).vision
        assert vision is not None, "the toy has a vision tower"
        special = SpecialTokens(image=IMAGE)
        numbers = {spelling: token for token, spelling in special_tokens().items()}
        encoding = DeepseekV41Encoding().with_special_tokens(special)
        return cls(
            tokenizer=tokenizer,
            vision=vision,
            encoding=encoding.with_tokenizer(RecipeTokenizer.from_str(tokenizer.to_str())),
            options=ConversionOptions()
            .with_model_alias(_ALIAS, ModelVersion.DeepseekV41Flash)
            .with_special_tokens(special),
            special={name: numbers[name] for name in (BOS, EOS, DSML, THINK_END, _ASSISTANT)},
        )


def encode(sample: Sample, codec: Codec) -> Encoded:
    """The sample's prompt, wanted answer and end token as ids; a document becomes BOS, its text and EOS, all marked.

    Raises ValueError when the messages' image parts are not as many as the images.
    """
    if sample.document:
        ids = [codec.special[BOS], *_text_ids(sample.document, codec), codec.special[EOS]]
        return _encoded(ids, [True] * len(ids), 0, ())
    compact = codec.encoding.encode(conversation(sample, codec))
    canvases = tuple(preprocess(image, codec.vision) for image in sample.images)
    lengths = [layout(image.shape[1], image.shape[0], codec.vision).tokens for image in sample.images]
    prompt = _expanded(compact, lengths)
    answer = answer_ids(sample.wanted, sample.thinking, codec)
    marks = _history_marks(prompt, codec) + [True] * len(answer)
    return _encoded(prompt + answer, marks, len(prompt), canvases)


def conversation(sample: Sample, codec: Codec) -> Any:
    """deepseek-recipe's conversation of a sample's messages, tools and wanted format."""
    body: dict[str, Any] = {
        "model": _ALIAS,
        "messages": _numbered_images(sample.messages),
        "thinking": {"type": "enabled" if sample.thinking else "disabled"},
    }
    if sample.tools:
        body["tools"] = list(sample.tools)
    if sample.response_format is not None:
        body["response_format"] = dict(sample.response_format)
    return ChatCompletionRequest(body).convert(codec.options).conversation


def answer_ids(answer: Answer, thinking: bool, codec: Codec) -> list[int]:
    """What the model must emit: thoughts and their end mark in thinking mode, text, calls, the end token."""
    ids: list[int] = []
    for i, piece in enumerate(answer_pieces(answer, thinking)):
        ids += [codec.special[piece]] if i % 2 else _text_ids(piece, codec)
    return ids


def decode_answer(ids: Sequence[int], codec: Codec, thinking: bool = False) -> Answer:
    """What emitted ids say, up to the first end token; malformed calls stay text."""
    end = codec.special[EOS]
    said = list(ids[: list(ids).index(end)]) if end in ids else list(ids)
    text = codec.tokenizer.decode(said, skip_special_tokens=False)
    return parse_answer(text, thinking)


def _numbered_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a short URL in place of each image: only its placeholder reaches the ids."""
    out = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_part(part) for part in content]}
        out.append(dict(message))
    return out


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'0').decode()}"}}


def _expanded(compact: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The ids with every image placeholder repeated to its span."""
    found = compact.count(IMAGE_ID)
    if found != len(lengths):
        raise ValueError(f"messages hold {found} image parts, images = {len(lengths)}: they must be equal; add or drop")
    ids: list[int] = []
    spans = iter(lengths)
    for token in compact:
        ids += [token] * (next(spans) if token == IMAGE_ID else 1)
    return ids


def _history_marks(prompt: Sequence[int], codec: Codec) -> list[bool]:
    """True for the tokens of earlier answers: behind the opened mode mark, up to their end token."""
    assistant, end = codec.special[_ASSISTANT], codec.special[EOS]
    marks = [False] * len(prompt)
    for i, token in enumerate(prompt):
        if token == assistant and end in prompt[i:]:
            last = prompt.index(end, i)
            marks[i + 2 : last + 1] = [True] * (last - i - 1)
    return marks


def _text_ids(text: str, codec: Codec) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _encoded(ids: list[int], marks: list[bool], prompt_len: int, canvases: tuple[NDArray[np.uint8], ...]) -> Encoded:
    array = np.asarray(ids, dtype=np.int32)
    # Only a rendered image has this id: text that spells the placeholder is plain text.
    return Encoded(array, np.asarray(marks, dtype=np.bool_), prompt_len, array == IMAGE_ID, canvases)
