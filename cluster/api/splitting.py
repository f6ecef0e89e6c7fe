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

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Piece]:
        """Parse the text these tokens completed."""
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

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Piece]:
        """Pass the text on."""
        return (Piece(content=text),) if text else ()

    def finish(self, is_length: bool) -> Sequence[Piece]:
        """Nothing is ever undecided."""
        return ()


class _Choice(msgspec.Struct):
    delta: Piece
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Chunk)


class RecipeSplitter:
    """Parses thinking sections and DSML tool calls with deepseek-recipe's stream processor.

    `thinking_end` is the token that closes the reasoning; tokens before it are counted here, since the processor
    counts by tokenising the text again.
    """

    __slots__ = ("_finish_reason", "_is_reasoning", "_processor", "_thinking_end", "reasoning_tokens")

    def __init__(self, conversation: ConversationRequest, thinking_end: int) -> None:
        generator = ChatCompletionRequest.chunk_generator(conversation, "", "")
        options = conversation.parsing_options
        self._processor = StreamProcessor(generator, options)
        self._processor.push(InferenceChunk.ready())  # gives the role, which the answer's first event carries anyway
        self._finish_reason: str | None = None
        self._thinking_end = thinking_end
        stage = options.thinking_initial_stage
        self._is_reasoning = stage is not None and stage.starts_in_reasoning()
        self.reasoning_tokens: int | None = None if stage is None else 0

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Piece]:
        """Parse; text after the end the parser saw (a closed block of tool calls) is dropped."""
        if self._processor.finished:
            return ()
        pieces = self._pieces(self._processor.push(InferenceChunk.text(text, len(token_ids)))) if text else ()
        if self._is_reasoning:
            self._count(token_ids, pieces)
        return pieces

    def _count(self, token_ids: Sequence[int], pieces: Sequence[Piece]) -> None:
        """Count reasoning tokens up to the closing one, or to the batch in which spelled-out text closed it."""
        is_closed = self._thinking_end in token_ids
        before = token_ids[: token_ids.index(self._thinking_end)] if is_closed else token_ids
        self.reasoning_tokens = (self.reasoning_tokens or 0) + len(before)
        self._is_reasoning = not is_closed and not any(piece.content or piece.tool_calls for piece in pieces)

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
        return pieces
