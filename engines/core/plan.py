"""What a scheduler decides and what it is told: ballots, plans, step results and events, as values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.engines.config import Role
from shoal.engines.core.request import (
    FinishEvent,
    FinishReason,
    ImageSpan,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from shoal.engines.core.sequence import Sequence


class StepKind(StrEnum):
    """What all ranks of a group do in one step."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank would like, read-only facts for the group's vote.

    `wants` prefill; `has_result`: a prefill step now would schedule or report something on this rank (False when the
    question does not arise); `is_idle`: nothing runs here; `vote_when_idle`: this group votes on every step while
    every rank is idle. `reason` says why it does not want, "" if it does.
    """

    role: Role
    decode_step: int
    wants: bool
    has_result: bool
    is_idle: bool
    all_interval: int
    any_interval: int
    vote_when_idle: bool
    reason: str = ""


class PlanItem(NamedTuple):
    """One sequence's rows in a step: positions [start, start + rows).

    `sequence` is borrowed: its fields are those of planning time until the plan is committed, then they move on.
    `completes`: the last row's hidden state yields a token (every decode row, and the last chunk of a prompt).
    """

    sequence: Sequence
    start: int
    rows: int
    completes: bool

    @property
    def request_id(self) -> str:
        """Whose rows these are."""
        return self.sequence.request_id

    @property
    def end(self) -> int:
        """First position after this step's rows, which is `cached` once the step is committed."""
        return self.start + self.rows

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the rows [start, end) as far as they are committed: a decode item's drafts are not among them."""
        return self.sequence.token_slice(self.start, self.start + self.rows)

    def lookback(self, count: int) -> tuple[int, ...]:
        """The `count` ids before `start`, oldest first, fewer at the beginning of the sequence."""
        return self.sequence.token_slice(max(0, self.start - count), self.start)

    @property
    def block_table(self) -> Seq[int]:
        """Block ids of the whole sequence; borrowed, valid until commit."""
        return self.sequence.block_table

    @property
    def slot(self) -> int:
        """State slot of the sequence."""
        return self.sequence.slot

    @property
    def is_fresh(self) -> bool:
        """Nothing of this sequence is cached: whatever its slot holds belongs to an earlier owner."""
        return self.start == 0

    @property
    def prompt_len(self) -> int:
        """The client's prompt length, from which truncation and output indices count."""
        return self.sequence.prompt_len

    @property
    def sampling(self) -> SamplingParams:
        """How to choose the next token."""
        return self.sequence.request.sampling

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """Image spans that intersect [start, end)."""
        return tuple(s for s in self.sequence.request.images if s.start < self.end and s.end > self.start)


class Ended(NamedTuple):
    """A sequence that leaves the scheduler with this plan, and why."""

    request_id: str
    reason: FinishReason
    output_tokens: int
    detail: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step on one rank; memory is already taken for it.

    `items` in batch order (decode: longest first). `clone_blocks` and `clone_slots` are (source, target) copies and
    `zero_slots` clears, to be done before the forward, in that order. `finished` sequences keep their memory until
    this plan is committed; `dropped` ones (refused, aborted while waiting, preempted for good) own none any more.
    `preempted` go back to waiting, to be recomputed. `reasons` says what was decided against and why.
    """

    step: int
    kind: StepKind
    items: tuple[PlanItem, ...]
    finished: tuple[Ended, ...] = ()
    dropped: tuple[Ended, ...] = ()
    preempted: tuple[str, ...] = ()
    clone_blocks: tuple[tuple[int, int], ...] = ()
    clone_slots: tuple[tuple[int, int], ...] = ()
    zero_slots: tuple[int, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all sequences together."""
        return sum(item.rows for item in self.items)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, aligned with `Plan.items`.

    `sampled[i]` is the token after the last row (any value for a chunk that does not complete its prompt).
    `accepted[i]` are the draft tokens verified before it; an empty outer sequence means that no step has drafts.
    `logprobs` likewise: empty, or one entry for each item, for its sampled token. `failed` maps request ids to what
    went wrong with that request alone; it ends with FinishReason.ERROR and pushes no token.
    """

    sampled: Seq[int]
    accepted: Seq[Seq[int]] = ()
    logprobs: Seq[TokenLogprobs | None] = ()
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A prompt has `cached` tokens in its blocks; `is_checkpoint`: the request asked for a cut here (an anchor)."""

    request_id: str
    cached: int
    is_checkpoint: bool


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A PROMPT engine computed the whole prompt and its first token; blocks and slot stay owned until `release`."""

    request_id: str
    cached: int
    first_token: int


Event = TokenEvent | FinishEvent | ChunkDone | PromptDone


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request entered the waiting queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where the first `tokens` tokens of a prompt are to be swapped in: its blocks in order, and its slot."""

    request_id: str
    tokens: int
    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory of a COMPLETION engine held for a sequence that is prefilled elsewhere, until admitted or cancelled."""

    request_id: str
    tokens: int
    blocks: tuple[int, ...]
    slot: int
    reserved_us: int
