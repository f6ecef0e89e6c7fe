"""The JSON a client reads: response objects, stream events and usage; the choices of a chat completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from shoal.cluster.api.answer import Answer, Delta, merge_tool_call

KEEPALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """Compact JSON."""
    return _ENCODER.encode(value)


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response repeats; `created` is Unix time in seconds, `kinds` name whole and chunk."""

    id: str
    model: str
    created: int
    is_stream: bool
    with_usage: bool
    kinds: tuple[str, str] = ("chat.completion", "chat.completion.chunk")

    def wrap(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response object or chunk around its choices."""
        body: dict[str, Any] = {
            "id": self.id,
            "object": self.kinds[self.is_stream],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None or (self.is_stream and self.with_usage):
            body["usage"] = usage
        return body


def usage_of(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of a request, as OpenAI and DeepSeek clients read them.

    The prompt is counted once whatever the number of choices; `cached_tokens` is the first choice's.
    """
    completion = sum(answer.completion_tokens for answer in answers)
    cached = answers[0].cached_tokens or 0
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt_tokens - cached,
    }
    reasoning = [answer.reasoning_tokens for answer in answers]
    if any(count is not None for count in reasoning):
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in reasoning)}
    return usage


def chunk_choice(index: int, delta: Delta) -> dict[str, Any]:
    """One choice of a stream chunk; fields without news are left out of its delta."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = delta.tool_calls
    logprobs = {"content": delta.logprobs} if delta.logprobs else None
    return {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": delta.finish_reason}


def role_choice(index: int) -> dict[str, Any]:
    """The first chunk of a choice: who speaks."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class Message:
    """A whole answer gathered from its deltas, for responses that are not streamed."""

    __slots__ = ("_content", "_logprobs", "_reasoning", "_tool_calls")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._tool_calls: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        for piece in delta.tool_calls:
            merge_tool_call(self._tool_calls, piece)

    def choice(self, index: int, finish_reason: str | None, wants_logprobs: bool) -> dict[str, Any]:
        """The choice of the response object; `content` is null when there are only tool calls."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._tool_calls else "")}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._tool_calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self._tool_calls
            ]
        logprobs = {"content": self._logprobs} if wants_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
