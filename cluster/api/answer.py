"""One answer in the making: token batches in, what the client may see out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster.api.errors import EngineError
from shoal.cluster.api.jobs import TokenBatch
from shoal.cluster.api.splitting import Piece, Splitter
from shoal.cluster.api.streaming import Detokeniser, StopMatcher
from shoal.engines.core.request import FinishReason, PromptScore, TokenLogprobs
from shoal.engines.grammar.token_bytes import TokenBytes

_FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Delta:
    """What one token batch adds for the client; false when everything is still held back."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason)


class Answer:
    """The text of one sequence: detokenised, split into reasoning, answer and tool calls, cut at stop strings.

    Stop strings are looked for in the answer, not in reasoning or tool calls, as deepseek-recipe does. With stop
    strings tokens are taken one at a time, so that `completion_tokens` does not depend on how they were batched;
    a token's log-probability is given out when all its text is, so that it leaks no stop string either.
    """

    __slots__ = (
        "_detokeniser", "_matcher", "_min_tokens", "_pending", "_splitter", "_tokens", "_wants_logprobs",
        "cached_tokens", "completion_tokens", "finish_reason", "prompt_scores",
    )  # fmt: skip

    def __init__(
        self,
        tokens: TokenBytes,
        decoder: tuple[Detokeniser, Splitter],
        stops: Sequence[str] = (),
        wants_logprobs: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokens = tokens
        self._detokeniser, self._splitter = decoder
        self._matcher = StopMatcher(stops) if stops else None
        self._wants_logprobs = wants_logprobs
        self._min_tokens = min_tokens
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()  # (characters of answer up to its end, entry)
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.prompt_scores: tuple[PromptScore, ...] = ()

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning section; None when the request has none."""
        return self._splitter.reasoning_tokens

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def push(self, batch: TokenBatch) -> Delta:
        """Take a batch; `finish_reason` is set when the answer is complete. Raises EngineError for a failed one."""
        assert not self.is_complete, "tokens after the end of an answer"
        if batch.cached_tokens is not None:
            self.cached_tokens = batch.cached_tokens
        self.prompt_scores = batch.prompt_scores or self.prompt_scores
        delta = Delta()
        if self._matcher is None:
            self._take(batch.token_ids, batch.logprobs, delta)
        else:
            for at, token_id in enumerate(batch.token_ids):
                self._take((token_id,), batch.logprobs[at : at + 1], delta)
                if self._is_cut():
                    return delta
        if batch.finish_reason is not None:
            self._finish(batch.finish_reason, batch.detail, delta)
        return delta

    def _take(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], delta: Delta) -> None:
        if not token_ids:
            return
        self.completion_tokens += len(token_ids)
        text = self._detokeniser.push(token_ids)
        self._show(self._splitter.push(text, token_ids), delta)
        if self._is_cut():
            self._finish_at_stop(delta)
        elif self._wants_logprobs:
            assert len(logprobs) == len(token_ids), f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens"
            end = 0 if self._matcher is None else self._matcher.emitted + self._matcher.held
            for token_id, entry in zip(token_ids, logprobs, strict=True):
                self._pending.append((end, self._logprob(token_id, entry)))
            self._release(delta)

    def _show(self, pieces: Sequence[Piece], delta: Delta) -> None:
        """Add what the splitter gave; the answer text passes the stop strings first."""
        for piece in pieces:
            if self._is_cut():
                return
            if piece.reasoning_content:
                delta.reasoning += piece.reasoning_content
            if piece.content:
                delta.content += self._cut(piece.content)
            for call in piece.tool_calls or ():
                merge_tool_call(delta.tool_calls, call)

    def _cut(self, text: str) -> str:
        """What of the answer's text may be shown now; below the least length no stop string counts, as in vLLM."""
        if self._matcher is None:
            return text
        return self._matcher.push(text) if self.completion_tokens > self._min_tokens else self._matcher.let_pass(text)

    def _finish(self, reason: FinishReason, detail: str, delta: Delta) -> None:
        name = _FINISH_NAMES.get(reason)
        if name is None:
            raise EngineError(f"the sequence ended with '{reason}'{': ' if detail else ''}{detail}")
        self._show(self._splitter.push(self._detokeniser.finish(), ()), delta)
        self._show(self._splitter.finish(is_length=reason == FinishReason.LENGTH), delta)
        if self._is_cut():
            self._finish_at_stop(delta)
            return
        if self._matcher is not None:
            delta.content += self._matcher.finish()
        self._release(delta)
        delta.finish_reason = "tool_calls" if name == "stop" and self._splitter.has_tool_calls else name
        self.finish_reason = delta.finish_reason

    def _is_cut(self) -> bool:
        return self._matcher is not None and self._matcher.matched is not None

    def _finish_at_stop(self, delta: Delta) -> None:
        self._pending.clear()
        self.finish_reason = delta.finish_reason = "stop"

    def _release(self, delta: Delta) -> None:
        shown = 0 if self._matcher is None else self._matcher.emitted
        while self._pending and self._pending[0][0] <= shown:
            delta.logprobs.append(self._pending.popleft()[1])

    def _logprob(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._spell(other, logprob) for other, logprob in entry.top]
        return {**self._spell(token_id, entry.token), "top_logprobs": top}

    def _spell(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.of(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


def merge_tool_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add one streamed piece of a tool call to the calls gathered so far: argument text is concatenated."""
    index = piece["index"]
    known = next((call for call in calls if call["index"] == index), None)
    if known is None:
        calls.append({**piece, "function": dict(piece["function"])})
        return
    function = piece["function"]
    target = known["function"]
    target["arguments"] = target.get("arguments", "") + function.get("arguments", "")
