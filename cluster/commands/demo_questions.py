"""What the demo asks, and whether an answer is right: questions of the tasks that the built-in model was taught.

They are drawn as an examination draws its own, so training has met none of them; each task's checker judges.
"""

import base64
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from shoal.cluster.commands.client import Reply
from shoal.engines.toy.tasks import arithmetic, chat, pictures, recall, schema, tools
from shoal.engines.toy.tasks.mixture import examination_random
from shoal.engines.toy.tasks.sample import Answer, Sample

SEED = 1126
# Which question of the seed each task asks: one that shows the task well.
RECALL, PICTURE, SUM, RECORD, CALL, TALK = 47, 58, 15, 22, 5, 122
TEXT_TOKENS, CODES = 480, 4
"""A text of three blocks of 128 tokens and its codes: two blocks lie before the kept rows and come from the store."""
ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to ask: what it shows, and the sample that holds the conversation and judges the answer."""

    title: str
    sample: Sample


def about_a_text() -> tuple[Sample, Sample]:
    """Two turns of one conversation: a code planted in a text, then another code of the same text."""
    second = recall.generate(_dice(RECALL), TEXT_TOKENS, CODES, turns=2)
    told = str(second.messages[1]["content"])
    (code,) = re.findall(r"\d+", told)
    judge = partial(recall.has_only_code, code)
    return replace(second, messages=second.messages[:1], wanted=Answer(told), is_right=judge), second


def others() -> tuple[Question, ...]:
    """One question of each other task, easy to read."""
    return (
        Question("a picture: the encoder's rows reach the prompt", pictures.generate(_dice(PICTURE), 1, 1)),
        Question("arithmetic, thinking", arithmetic.generate(_dice(SUM), held_out=True)),
        Question("JSON from a sentence", schema.generate(_dice(RECORD))),
        Question("a tool call", tools.generate(_dice(CALL))),
        Question("something to know by heart", chat.generate(_dice(TALK))),
    )


def _dice(index: int) -> Random:
    return examination_random(SEED, index)


def body_of(sample: Sample, model: str) -> dict[str, Any]:
    """The greedy chat completion request of a sample. Raises ValueError for a wanted format: no engine can force it."""
    if sample.response_format is not None:
        raise ValueError("response_format needs structured output; choose a sample whose system turn spells the schema")
    pixels = iter(sample.images)
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message, pixels) for message in sample.messages],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "thinking": {"type": "enabled" if sample.thinking else "disabled"},
    }
    return body | ({"tools": list(sample.tools)} if sample.tools else {})


def _message(message: Mapping[str, Any], pixels: Any) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": [_data_url(next(pixels)) if p["type"] == "image" else dict(p) for p in content]}


def _data_url(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def answer_of(reply: Reply) -> Answer:
    """A reply as the checkers take it; arguments that are no JSON object stay a string, which no checker wants."""
    return Answer(reply.text, reply.reasoning, tuple((name, _arguments(text)) for name, text in reply.calls))


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"": text}


def told(answer: Answer) -> str:
    """An answer in one line: its text, or its calls as Python would spell them."""
    calls = [f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in answer.calls]
    return " ".join([*filter(None, [answer.text.strip()]), *calls]) or "(nothing)"


def asked(sample: Sample) -> list[str]:
    """What a person needs to see of a sample: system turn, tools, pictures and the end of the last turn."""
    lines = [f"{m['role']}: {m['content']}" for m in sample.messages if m["role"] == "system"]
    lines += [f"tool: {_signature(tool['function'])}" for tool in sample.tools]
    lines += [f"picture: {image.shape[1]} x {image.shape[0]} pixels" for image in sample.images]
    content = sample.messages[-1]["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    before, _, last = text.rpartition("\n\n")
    return [*lines, f"asked: {'… ' if before else ''}{last}"]


def _signature(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters']['properties'])})"
