"""What differs between the routes that generate: how a body is read and what its choices look like; chat's own."""

from collections.abc import Sequence
from typing import Any, Protocol

from shoal.cluster.api import events
from shoal.cluster.api.answer import Answer, Delta
from shoal.cluster.api.body import ChatBody, SamplingBody, parse_body
from shoal.cluster.api.codec import ChatCodec, Prompt
from shoal.cluster.api.scores import prompt_logprobs
from shoal.cluster.api.settings import ApiSettings
from shoal.engines.grammar.token_bytes import TokenBytes


class Shape(Protocol):
    """The choices of one response."""

    def opening(self, index: int) -> dict[str, Any]:
        """The first choice of a stream, before any news of it."""
        ...

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """News of a streamed choice."""
        ...

    def whole(self, index: int, deltas: Sequence[Delta], answer: Answer) -> dict[str, Any]:
        """A complete choice."""
        ...

    def around(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Fields of a complete response beside its choices."""
        ...


class Dialect(Protocol):
    """One route. `kinds` name a whole response and a chunk of a streamed one."""

    id_prefix: str
    kinds: tuple[str, str]

    def read(self, raw: bytes, codec: ChatCodec, settings: ApiSettings) -> "Request":
        """Decode and check a body. Raises BadRequestError."""
        ...


class Request(Protocol):
    """One body that was read."""

    @property
    def body(self) -> SamplingBody:
        """What it says of sampling and queues."""
        ...

    def encode(self) -> Prompt:
        """Its prompt. Raises BadRequestError, PromptTooLongError."""
        ...

    def shape(self, prompt: Prompt) -> Shape:
        """How its choices look."""
        ...


class ChatDialect:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")

    def read(self, raw: bytes, codec: ChatCodec, settings: ApiSettings) -> "ChatRequest":
        """Decode and check a body. Raises BadRequestError."""
        return ChatRequest(parse_body(raw, settings), codec, settings)


class ChatRequest:
    """One chat."""

    def __init__(self, body: ChatBody, codec: ChatCodec, settings: ApiSettings) -> None:
        self.body, self._codec, self._settings = body, codec, settings

    def encode(self) -> Prompt:
        """Its prompt. Raises BadRequestError, PromptTooLongError."""
        return self._codec.encode(self.body, self._settings)

    def shape(self, prompt: Prompt) -> "ChatShape":
        """How its choices look."""
        return ChatShape(self.body, prompt, self._codec.tokens)


class ChatShape:
    """The choices of one chat completion."""

    def __init__(self, body: ChatBody, prompt: Prompt, tokens: TokenBytes) -> None:
        self._body, self._prompt, self._tokens = body, prompt, tokens

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        return events.role_choice(index)

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """News of a streamed choice."""
        return events.chunk_choice(index, delta)

    def whole(self, index: int, deltas: Sequence[Delta], answer: Answer) -> dict[str, Any]:
        """A complete choice."""
        message = events.Message()
        for delta in deltas:
            message.add(delta)
        return message.choice(index, answer.finish_reason, self._body.alternatives is not None)

    def around(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """`prompt_logprobs`, if they were asked for."""
        if self._body.prompt_alternatives is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._prompt.token_ids, answers[0].prompt_scores, self._tokens)}
