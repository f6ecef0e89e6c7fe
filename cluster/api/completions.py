"""`/v1/completions`: continue a text or token ids; its body, its choices with `echo`, its form of log-probabilities."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from shoal.cluster.api.answer import Answer, Delta
from shoal.cluster.api.body import SamplingBody, check_ranges, check_sampling, decode_body, refuse
from shoal.cluster.api.codec import ChatCodec, Prompt
from shoal.cluster.api.errors import BadRequestError, PromptTooLongError
from shoal.cluster.api.scores import prompt_logprobs
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.api.streaming import Detokeniser
from shoal.engines.grammar.token_bytes import TokenBytes

TOKENS_DEFAULT = 16  # as OpenAI and vLLM have it


class CompletionBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    """Every accepted field of a text completion; `suffix` and `best_of` only with values that change nothing."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def tokens_least(self) -> int:
        """Nothing may be asked for where the prompt comes back."""
        return 0 if self.echo else 1

    @property
    def tokens_max(self) -> int:
        """The wanted output limit."""
        return TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each output token; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives to score each prompt token with: an echo has scores where the output has them."""
        wishes = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((wish for wish in wishes if wish is not None), default=None)


_DECODER = msgspec.json.Decoder(CompletionBody)


class CompletionDialect:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")

    def read(self, raw: bytes, codec: ChatCodec, settings: ApiSettings) -> "CompletionRequest":
        """Decode and check a body. Raises BadRequestError naming the field, its value, the rule and the remedy."""
        body = decode_body(_DECODER, raw)
        check_ranges(body, (("logprobs", 0, settings.top_logprobs_max), ("best_of", 1, settings.choices_max)))
        check_sampling(body, settings)
        if body.suffix:
            raise refuse("suffix", body.suffix, "is not supported: this model fills in nothing; leave it out")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise refuse("best_of", body.best_of, "must equal n: all answers are returned, as vLLM V1 has it; use n")
        if body.stream and body.echo and body.logprobs is not None:
            rule = "echo with logprobs is not available with stream = true; ask without"
            raise BadRequestError(rule, param="echo", code="invalid_value")
        return CompletionRequest(body, codec, settings)


class CompletionRequest:
    """One text to continue."""

    def __init__(self, body: CompletionBody, codec: ChatCodec, settings: ApiSettings) -> None:
        self.body, self._codec, self._settings = body, codec, settings

    def encode(self) -> Prompt:
        """Its prompt. Raises BadRequestError, PromptTooLongError."""
        given, context = _only(self.body.prompt), self._settings.context_tokens
        ids = self._codec.encode_text(given) if isinstance(given, str) else _checked(given, self._codec.tokens)
        wanted = max(1, self.body.tokens_max)
        if len(ids) + wanted > context:
            raise PromptTooLongError(
                f"prompt: {len(ids)} prompt tokens plus {wanted} output tokens exceed the context of {context}; "
                "shorten the prompt or lower max_tokens",
                param="prompt",
            )
        return Prompt(ids, (), (), wanted)

    def shape(self, prompt: Prompt) -> "CompletionShape":
        """How its choices look."""
        given = _only(self.body.prompt)
        if isinstance(given, str):
            return CompletionShape(self.body, prompt, self._codec.tokens, given)
        detokeniser = Detokeniser(self._codec.tokens)
        return CompletionShape(self.body, prompt, self._codec.tokens, detokeniser.push(given) + detokeniser.finish())


class CompletionShape:
    """The choices of one text completion. `echoed` is the prompt's text."""

    def __init__(self, body: CompletionBody, prompt: Prompt, tokens: TokenBytes, echoed: str) -> None:
        self._body, self._prompt, self._tokens = body, prompt, tokens
        self._echoed = echoed if body.echo else ""
        self._offsets: dict[int, int] = {}  # characters of each streamed choice's tokens so far

    def opening(self, index: int) -> dict[str, Any]:
        """The prompt, or nothing."""
        self._offsets[index] = len(self._echoed)
        return {"index": index, "text": self._echoed, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """News of a streamed choice."""
        logprobs = None
        if delta.logprobs:
            logprobs = _text_logprobs(delta.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(entry["token"]) for entry in delta.logprobs)
        return {"index": index, "text": delta.content, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def whole(self, index: int, deltas: Sequence[Delta], answer: Answer) -> dict[str, Any]:
        """A complete choice; nothing of the answer where no tokens were asked for."""
        told = deltas if self._body.tokens_max else ()
        text = self._echoed + "".join(delta.content for delta in told)
        logprobs = None
        if self._body.logprobs is not None:
            entries = [entry for delta in told for entry in delta.logprobs]
            logprobs = _text_logprobs([*self._echoed_entries(answer), *entries], 0)
        reason = answer.finish_reason if told else "length"
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt.token_ids, answer.prompt_scores, self._tokens)
        return choice

    def around(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Nothing: each choice has its own."""
        return {}

    def _echoed_entries(self, answer: Answer) -> Iterable[dict[str, Any]]:
        """The prompt's tokens as the answer's are described; the first has no log-probability."""
        if not self._body.echo:
            return
        ids, count = self._prompt.token_ids, self._body.logprobs or 0
        yield {"token": self._spelled(ids[0]), "logprob": None, "top_logprobs": None}
        for token_id, score in zip(ids[1:], answer.prompt_scores, strict=True):
            top = [{"token": self._spelled(other), "logprob": value} for other, value in score.top[:count]]
            yield {"token": self._spelled(token_id), "logprob": score.logprob, "top_logprobs": top}

    def _spelled(self, token_id: int) -> str:
        return self._tokens.of(token_id).decode(errors="replace")


def _text_logprobs(entries: Sequence[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Lists in parallel, as this route has them; among the alternatives is the token itself. Offsets are in characters
    of the tokens' own spellings, from `offset`."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    tops = [
        None
        if entry["top_logprobs"] is None
        else {entry["token"]: entry["logprob"]} | {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        for entry in entries
    ]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _only(prompt: str | list[Any]) -> str | list[Any]:
    """The prompt of a list of one. Raises BadRequestError."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise refuse("prompt", len(prompt), "prompts in one request; send each by itself")
        return prompt[0]
    return prompt


def _checked(ids: list[Any], tokens: TokenBytes) -> tuple[int, ...]:
    if not ids:
        raise refuse("prompt", ids, "must be text or at least one token id")
    limit = len(tokens.pieces)
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < limit:
            raise refuse(f"prompt[{index}]", token_id, f"must be a token id from 0 to {limit - 1}")
    return tuple(ids)
