"""What a scheduler decides and what it is told: ballots, plans, step results and events, as values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.engines.config import Role
from shoal.engines.core.request import (
    BranchToken,
    EngineRequest,
    FinishEvent,
    FinishReason,
    ImageSpan,
    PromptScores,
    SamplingParams,
    TokenLogprobs,
    TokensEvent,
)
from shoal.engines.core.sequence import Sequence
from shoal.engines.core.verify.estimators import StepTimes


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
    A decode item's rows are the last committed token and the first `rows - 1` of its held drafts, to be verified.

    Draft info (what a draft was drawn from) lives on the device, in slots 1..sequences_max of drafts each; slot 0
    is never written and says "pad, with probability 1". `read_slot`: whose drafts this step verifies, 0 = there are
    none or they are pads. `write_slot`: where this step puts the drafts that it makes, 0 = it makes none. Both are
    0 without drafts. A step reads before it writes: the two are one slot or `read_slot` is 0. A completing prefill
    item of a NORMAL engine has a `write_slot` too; a runner that does not draft there leaves it alone.
    """

    sequence: Sequence
    start: int
    rows: int
    completes: bool
    read_slot: int = 0
    write_slot: int = 0

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
        """Ids of the rows [start, end) as far as the host knows them: committed ones, then held drafts (or pads).

        All `rows` of them, except where the step before is still open (pipelined decode): then fewer, mostly none.
        """
        sequence, end = self.sequence, self.start + self.rows
        committed = sequence.token_slice(self.start, end)
        if end <= sequence.len or self.start >= sequence.len:
            return committed
        return committed + tuple(sequence.drafts[: end - sequence.len])

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

    `behind`: the open decode step that this decode step was planned behind, 0 = none. Items of sequences in both
    start where they would if that step accepted every draft, and read no draft slot, until `fix_up`; their
    successor's `behind` is 0. `finished` ones then keep their memory until the step before is committed.
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
    behind: int = 0

    @property
    def rows(self) -> int:
        """Rows of all sequences together."""
        return sum(item.rows for item in self.items)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, aligned with `Plan.items`.

    `sampled[i]` is the token after the last row (any value for a chunk that does not complete its prompt).
    Each of the following is empty (nobody has any) or has one entry an item:

    `accepted[i]`: the held drafts that were accepted, in order, at most rows - 1; they come before the sampled token.
    `logprobs[i]`: of the sampled token. `accepted_logprobs[i]`: of the accepted drafts, one each where the sampled
    token has one, or empty.
    `drafts[i]`: the next drafts, `drafts` ids of the rules, written to `write_slot`; empty = none were made, and the
    next step verifies pads. Of a prefill item only where it completes a prompt of a NORMAL engine.
    `confidences[i]`: raw acceptance confidence of each of the next drafts, 0..1; empty = no confidence head.

    `failed` maps request ids to what went wrong with that request alone; it ends with FinishReason.ERROR and pushes
    no token. `times` of a decode step, if they were taken: lengths of verification are chosen by them.
    `branched`: first tokens of the branches of each prompt that this step completed. `prompt_scores`: of the rows of
    prompts that ask for them.
    """

    sampled: Seq[int]
    accepted: Seq[Seq[int]] = ()
    logprobs: Seq[TokenLogprobs | None] = ()
    failed: tuple[tuple[str, str], ...] = ()
    drafts: Seq[Seq[int]] = ()
    confidences: Seq[Seq[float]] = ()
    accepted_logprobs: Seq[Seq[TokenLogprobs]] = ()
    times: StepTimes | None = None
    branched: tuple[tuple[str, tuple[BranchToken, ...]], ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Branched:
    """What became of a branch of `parent_id`: it has begun here, its first token comes next; or `refusal` says why it
    must be computed by itself. `request` is the branch's own."""

    parent_id: str
    request: EngineRequest
    refusal: str = ""

    @property
    def request_id(self) -> str:
        """The branch's name."""
        return self.request.request_id


Event = TokensEvent | FinishEvent | ChunkDone | PromptDone | Branched


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
