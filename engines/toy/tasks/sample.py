"""The values that all tasks share: a conversation with a wanted answer, and how an answer is judged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said in one turn: the text, the thoughts before it, and tool calls as (name, arguments)."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation of a task, up to the turn that is answered last.

    messages: OpenAI chat messages that end with a user (or tool) turn; a content part {"type": "image"} stands for the
    next of `images`, uint8 [height, width, 3] pictures before any preprocessing. `wanted` is the answer that is
    trained on. `is_right` judges any answer; `is_valid` only its form (JSON that fits the schema, a well-formed call).
    A sample with `document` has no conversation: its text is plain prose or code, nothing is judged.
    """

    task: str
    messages: tuple[Mapping[str, Any], ...] = ()
    wanted: Answer = Answer()
    is_right: Callable[[Answer], bool] = field(default=lambda answer: True, compare=False)
    is_valid: Callable[[Answer], bool] = field(default=lambda answer: True, compare=False)
    images: tuple[NDArray[np.uint8], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None
    thinking: bool = False
    document: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample as the service would tokenise it, with the wanted answer and its end token appended.

    ids int32 [n], image placeholders expanded; answer bool [n]: tokens that the assistant has to produce (end tokens
    included), in all turns; prompt_len: tokens before the last answer; image_mask bool [n]; canvases: the
    preprocessed pictures in order of their spans.
    """

    ids: NDArray[np.int32]
    answer: NDArray[np.bool_]
    prompt_len: int
    image_mask: NDArray[np.bool_]
    canvases: tuple[NDArray[np.uint8], ...] = ()
