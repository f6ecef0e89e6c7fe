"""Splits generated text into reasoning, answer and tool calls as it streams, through deepseek-recipe."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
)


class Piece(msgspec.Struct):
    """What one stretch of generated text adds to the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Splitter(Protocol):
    """The parser of one answer."""

    reasoning_tokens: int | None

    def push(self, text: str, tokens: int) -> Sequence[Piece]:
        """Parse text that accounts for `tokens` tokens."""
        ...

    def finish(self, is_length: bool) -> Sequence[Piece]:
        """End the text (by the token limit or not) and give out what was undecided."""
        ...

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer ended in complete tool calls; known after `finish`."""
        ...


class PlainSplitter:
    """All text is answer: neither thinking nor tools were asked for."""

    __slots__ = ("reasoning_tokens",)
    has_tool_calls = False

    def __init__(self) -> None:
        self.reasoning_tokens: int | None = None

    def push(self, text: str, tokens: int) -> Sequence[Piece]:
        """Pass the text on."""
        return (Piece(content=text),) if text else ()

    def finish(self, is_length: bool) -> Sequence[Piece]:
        """Nothing is ever undecided."""
        return ()


class _Choice(msgspec.Struct):
    delta: Piece
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class RecipeSplitter:
    """Parses thinking sections and DSML tool calls with deepseek-recipe's stream processor."""

    __slots__ = ("_finish_reason", "_processor", "reasoning_tokens")

    def __init__(self, conversation: ConversationRequest) -> None:
        generator = ChatCompletionRequest.chunk_generator(conversation, "", "")
        self._processor = StreamProcessor(generator, conversation.parsing_options)
        self._processor.push(InferenceChunk.ready())  # gives the role, which the answer's first event carries anyway
        self._finish_reason: str | None = None
        self.reasoning_tokens: int | None = None

    def push(self, text: str, tokens: int) -> Sequence[Piece]:
        """Parse; text after the end the parser saw (a closed block of tool calls) is dropped."""
        if self._processor.finished:
            return ()
        return self._pieces(self._processor.push(InferenceChunk.text(text, tokens)))

    def finish(self, is_length: bool) -> Sequence[Piece]:
        """Flush the parser."""
        if self._processor.finished:
            return ()
        reason = InferenceFinishReason.Length if is_length else InferenceFinishReason.Stop
        chunks = self._processor.push(InferenceChunk.finish(reason))
        return self._pieces([*chunks, *self._processor.finish()])

    @property
    def has_tool_calls(self) -> bool:
        """Whether the parser ended with complete tool calls."""
        return self._finish_reason == "tool_calls"

    def _pieces(self, chunks: Sequence[Any]) -> list[Piece]:
        pieces = []
        for raw in chunks:
            chunk = _DECODER.decode(raw.to_json())
            for choice in chunk.choices:
                pieces.append(choice.delta)
                self._finish_reason = choice.finish_reason or self._finish_reason
            if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                self.reasoning_tokens = chunk.usage.completion_tokens_details.reasoning_tokens
        return pieces
