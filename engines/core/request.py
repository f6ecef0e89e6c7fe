"""What an engine is asked to compute and what it reports back, as frozen values every folder may read."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.engines.core.grammar.spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen; limits are checked where the value enters the system.

    `temperature` 0 is greedy. `top_k` -1 and `min_p` 0 are off. `logprobs` is the number of alternatives to
    report (None: none, 0: only the sampled token). `seed` is 64 bit and always set: sampling is a pure function
    of (seed, position), so another engine continues the same stream.

    `min_tokens`: neither EOS nor a stop token is chosen before so many output tokens. `logit_bias`: (token id, what is
    added to its logit). Penalties as OpenAI (presence, frequency: of the output) and vLLM (repetition: of prompt and
    output) define them; 0, 0 and 1 are off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where one image sits in the prompt: `length` placeholder tokens from position `start`, delimiters included.

    `digest` names the preprocessed pixels and their layout; `grid_rows` x `grid_columns` IMAGE tokens,
    length == grid_rows * (grid_columns + 1) + 2.
    """

    start: int
    length: int
    grid_rows: int
    grid_columns: int
    digest: bytes

    @property
    def end(self) -> int:
        """First position after the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Branch:
    """Another answer to a prompt: a sequence of its own, `request_id`, that differs in nothing but the seed."""

    request_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to compute.

    `token_ids` is the client's prompt, images expanded to placeholders, followed by tokens already produced
    elsewhere when a request is re-routed. `prompt_len` is the length of the client's prompt alone: output tokens
    are counted from it, and YOCO truncation keeps `prompt_len - keep` as its first decoder row, so a re-routed
    request computes exactly what the first engine computed. `hit_tokens` (a multiple of the grain) will be
    swapped in from the store before the sequence may run. `checkpoints` are absolute positions where a prefill
    chunk must end (anchors to save). `grammar` rules the output tokens, those already produced included.

    What it asks of the queue: `priority`, greater goes first; `deadline_us`, 0 = none, earlier goes first among
    equals, and a prompt that is not begun by then ends with an error; `user`, whose requests share by tokens.

    `branches` begin when its prompt is computed, here or where it is handed off to, and share the prompt's blocks.
    `prompt_logprobs`: score each token of the prompt with so many alternatives (None: do not). Then every layer
    computes every position: nothing is truncated, and there is no hit.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    images: tuple[ImageSpan, ...] = ()
    hit_tokens: int = 0
    checkpoints: tuple[int, ...] = ()
    arrival_us: int = 0
    grammar: GrammarSpec | None = None
    priority: int = 0
    deadline_us: int = 0
    user: str = ""
    branches: tuple[Branch, ...] = ()
    prompt_logprobs: int | None = None


class FinishReason(StrEnum):
    """Why a sequence ended, as clients see it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output position under the final (tempered, filtered) distribution."""

    token: float
    top: tuple[tuple[int, float], ...] = ()


class PromptScore(NamedTuple):
    """What the model thinks of one prompt token after those before it: log-probability, rank among all tokens (from 1)
    and the likeliest tokens with theirs, of its own distribution: without temperature, filters or penalties."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of consecutive prompt tokens from position `first`; position 0 has none. May come again, in any order."""

    request_id: str
    first: int
    scores: tuple[PromptScore, ...]


class TokensEvent(NamedTuple):
    """The output tokens, at least one, that one step gave a sequence. `logprobs`: one a token, or empty.

    `index` is the first one's: it counts output tokens of the request from 0, over all attempts, which makes delivery
    idempotent and gaps visible. A named tuple, for a step makes hundreds of them."""

    request_id: str
    index: int  # type: ignore[assignment]  # tuple.index, which nobody wants of an event
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchToken:
    """The first token of a branch, drawn with its seed where the prompt was computed."""

    request_id: str
    seed: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A sequence ended in this engine; `output_tokens` counts all output tokens of the request."""

    request_id: str
    reason: FinishReason
    output_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request an engine will never be able to serve, with the rule it breaks and the remedy.

    `is_full`: that is its queue, so another engine may serve it, and this one later.
    """

    request_id: str
    reason: str
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A reservation that cannot be had now."""

    blocks_short: int = 0
    slots_short: int = 0
    sequences_short: int = 0


@dataclass(frozen=True, slots=True)
class TokenState:
    """What travels with a hand-off besides bytes (P to D): everything else follows from these.

    `token_ids` = prompt + outputs so far, the last one sampled but not yet computed; cached == len - 1. `branches`
    of the prompt that have not ended with their first tokens begin where this is admitted.
    """

    request: EngineRequest
    token_ids: tuple[int, ...]
    branches: tuple[BranchToken, ...] = ()

    @property
    def cached(self) -> int:
        """Tokens whose KV the hand-off carries."""
        return len(self.token_ids) - 1
