"""What one engine step gives its surroundings, as values that stay valid after the step."""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.engines.core.plan import Branched, Plan, PlanItem, StepKind, StepResult
from shoal.engines.core.request import FinishEvent, PromptScores, TokensEvent, TokenState
from shoal.engines.ports import GrainMemory


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A prompt's chunk is computed. `blocks` are the ids of the whole blocks it completed, the first of them being
    block number `first_block` of the sequence; they no longer change. `cached` counts computed tokens."""

    request_id: str
    cached: int
    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptReady:
    """A prompt waits for its hand-off: all its blocks (the last may be partial) and its slot, owned until release."""

    request_id: str
    state: TokenState
    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class GrainToSave:
    """A copy of one complete block: grain number `index` of the request, which covers `token_ids`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    payload: bytes


@dataclass(frozen=True, slots=True)
class AnchorToSave:
    """A copy of a slot's stored region when exactly `tokens` tokens (a multiple of the grain) were computed."""

    request_id: str
    tokens: int
    payload: bytes


class DraftTotals(NamedTuple):
    """Draft tokens of one step: made for the next ones, verified (pads do not count) in so many sequences, accepted."""

    made: int = 0
    sequences: int = 0
    verified: int = 0
    accepted: int = 0


NO_DRAFTS = DraftTotals()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one step produced. `rows` were computed; 0 means that nothing was due. False if there is no news.

    `verified[i]` and `accepted[i]` count sequences whose draft number i was judged, those before it being right, and
    was right; () in a step that judged none. What `branched` says of a branch comes before its tokens in `events`.
    """

    step: int
    kind: StepKind
    rows: int
    events: tuple[TokensEvent | FinishEvent, ...] = ()
    chunks: tuple[ChunkReady, ...] = ()
    prompts: tuple[PromptReady, ...] = ()
    grains: tuple[GrainToSave, ...] = ()
    anchors: tuple[AnchorToSave, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    drafts: DraftTotals = NO_DRAFTS
    branched: tuple[Branched, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.prompts or self.branched)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a balancer may know of one rank: free memory (null items left out) and work that is queued or running.

    `reserved` sequences are being prefilled elsewhere. `waiting_tokens` are the prompts' lengths, `uncached_tokens`
    what is left to compute of them when their hits come true. `context_tokens` is the running sequences' length.
    """

    blocks_free: int
    blocks_count: int
    slots_free: int
    slots_count: int
    running: int
    context_tokens: int
    reserved: int
    waiting: int
    waiting_tokens: int
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """One item of a step before it is committed: tokens computed before and after, and where they lie.

    `accepted` drafts are among the computed tokens, and not yet among the sequence's.
    """

    item: PlanItem
    before: int
    after: int
    blocks: tuple[int, ...]
    accepted: tuple[int, ...] = ()

    def whole_blocks(self, block_tokens: int) -> range:
        """Numbers of the blocks that this step completed."""
        return range(self.before // block_tokens, self.after // block_tokens)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of computed positions [start, end)."""
        return (self.item.sequence.token_slice(start, end) + self.accepted)[: end - start]


def progress(plan: Plan, result: StepResult) -> tuple[Progress, ...]:
    """What each item of a step added, requests that failed left out. Rejected drafts do not count."""
    failed = {request_id for request_id, _ in result.failed}
    made = []
    for i, item in enumerate(plan.items):
        if item.request_id in failed:
            continue
        after, accepted = item.end, tuple(result.accepted[i]) if result.accepted else ()
        if plan.kind is StepKind.DECODE:
            after = item.start + 1 + len(accepted)
        made.append(Progress(item, item.start, after, tuple(item.block_table), accepted))
    return tuple(made)


def draft_counts(plan: Plan, result: StepResult) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafts judged and accepted in a step, by their number; pads do not count, and neither does a failed request."""
    failed = {request_id for request_id, _ in result.failed}
    judged = [
        (len(accepted), item.rows - 1)
        for item, accepted in zip(plan.items, result.accepted, strict=False)
        if item.read_slot and item.request_id not in failed
    ]
    most = max((drafts for _, drafts in judged), default=0)
    verified = tuple(sum(i < drafts and i <= right for right, drafts in judged) for i in range(most))
    return verified, tuple(sum(i < right for right, _ in judged) for i in range(most))


def draft_totals(plan: Plan, result: StepResult) -> DraftTotals:
    """What a step did with drafts, whether or not an earlier one was right; a failed request does not count."""
    failed = {request_id for request_id, _ in result.failed}
    judged = [
        (item.rows - 1, len(accepted))
        for item, accepted in zip(plan.items, result.accepted, strict=False)
        if item.read_slot and item.rows > 1 and item.request_id not in failed
    ]
    verified, accepted = sum(rows for rows, _ in judged), sum(right for _, right in judged)
    return DraftTotals(sum(map(len, result.drafts)), len(judged), verified, accepted)


def grains_of(made: tuple[Progress, ...], memory: GrainMemory, block_tokens: int) -> tuple[GrainToSave, ...]:
    """Copies of the grains that a step completed; to be taken before the step is committed."""
    return tuple(
        GrainToSave(
            p.item.request_id,
            index,
            p.token_ids(index * block_tokens, (index + 1) * block_tokens),
            memory.read_block(p.blocks[index]),
        )
        for p in made
        for index in p.whole_blocks(block_tokens)
    )


def anchors_of(
    made: tuple[Progress, ...], kind: StepKind, memory: GrainMemory, block_tokens: int
) -> tuple[AnchorToSave, ...]:
    """Copies of stored regions where one is due; to be taken before the step is committed.

    Prefill: at the request's checkpoints. Decode: whenever the computed length reaches a multiple of the grain, or
    passes it by accepted drafts: rings keep their window behind it for as many rows as a step has.
    """
    due = []
    for p in made:
        at = p.after // block_tokens * block_tokens if kind is StepKind.DECODE else p.after
        if at > p.before and (kind is StepKind.DECODE or (_is_whole(at, block_tokens) and _is_checkpoint(p))):
            due.append((p, at))
    return tuple(AnchorToSave(p.item.request_id, at, memory.read_stored(p.item.slot, at)) for p, at in due)


def _is_whole(tokens: int, block_tokens: int) -> bool:
    return tokens % block_tokens == 0


def _is_checkpoint(p: Progress) -> bool:
    return p.after in p.item.sequence.request.checkpoints


def chunk_ready(p: Progress, block_tokens: int) -> ChunkReady:
    """The whole blocks a prefill item completed."""
    whole = p.whole_blocks(block_tokens)
    return ChunkReady(p.item.request_id, p.after, whole.start, p.blocks[whole.start : whole.stop])
