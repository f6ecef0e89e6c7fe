"""Choose the chunks of a prefill step: a read-only selection, and a plan that takes the memory it needs."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.engines.config import STEP_TIME_AUTO, STEP_TIME_OFF, Role
from shoal.engines.core.chunking import cut_chunk
from shoal.engines.core.layout import align_up
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import Ended, PlanItem
from shoal.engines.core.prefill_cost import Chunk, Coefficients
from shoal.engines.core.queueing import count_overtaken, in_order, is_due
from shoal.engines.core.sequence import Sequence


class Pick(NamedTuple):
    """The next `rows` of a prompt; `completes` it or not; its checkpoint index once the chunk is planned."""

    sequence: Sequence
    rows: int
    completes: bool
    next_checkpoint: int


@dataclass(slots=True)
class Selection:
    """What a prefill step would do. Nothing has been moved or taken yet.

    `removed`: sequences that leave the queue in walking order, with why they are refused, or "" for dead ones.
    """

    picks: list[Pick] = field(default_factory=list)
    removed: list[tuple[Sequence, str]] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing would be computed, refused or removed."""
        return not (self.picks or self.removed)


@dataclass(slots=True)
class Budget:
    """What is left of a step's limits while prompts are picked; pools are counted, not touched.

    `time_us` is what chunks may still cost by `cost`; without a cost (no limit, or nothing measured yet) time is free.
    """

    rows: int
    keys: int
    sequences: int
    blocks: int
    slots: int
    admits_new: bool
    cost: Coefficients | None = None
    time_us: float = 0.0


class PrefillPlan(NamedTuple):
    """The prefill part of a plan."""

    items: list[PlanItem]
    finished: list[Ended]
    dropped: list[Ended]
    reasons: list[tuple[str, str]]


def wants_prefill(ledger: Ledger) -> str:
    """Why this rank does not want a prefill step; "" if it does (engine runtime notes 2).

    A prompt that owns its memory already needs none of the free blocks, so the watermark does not stop it.
    """
    if not ledger.waiting:
        return "nothing waits"
    admits_new = ledger.is_below_watermark()
    for sequence in ledger.waiting:
        if sequence.is_finished:
            if ledger.rules.purge_before_vote:
                continue
            return "" if admits_new and not sequence.is_waiting_for_images else "head is dead"
        if sequence.is_schedulable and (admits_new or sequence.holds_memory):
            return ""
        if not ledger.rules.younger_may_pass:
            break
    return "nothing that waits is ready" if admits_new else "blocks in use are above the watermark"


def select(ledger: Ledger) -> Selection:
    """Walk the waiting queue and pick chunks until a limit is reached (engine runtime notes 3); changes nothing."""
    selection = Selection()
    if ledger.config.role is Role.NORMAL and wants_prefill(ledger):
        return selection
    budget = _opening_budget(ledger)
    for sequence in in_order(ledger):
        if sequence.is_finished:
            selection.removed.append((sequence, ""))
            continue
        if not sequence.is_schedulable:
            selection.reasons.append((sequence.request_id, "not ready"))
            if ledger.rules.younger_may_pass:
                continue
            break
        if not sequence.holds_memory and (detail := ledger.refusal(sequence.len, sequence)):
            selection.removed.append((sequence, detail))
            continue
        if not sequence.holds_memory and (reason := _why_no_memory(ledger, sequence, budget)):
            selection.reasons.append((sequence.request_id, reason))
            if not ledger.rules.younger_may_pass:
                break
            if is_due(ledger, sequence):
                budget.admits_new = False  # only prompts that own their memory may still pass, so nobody is starved
            continue
        reason = _pick(ledger, sequence, budget, selection)
        if reason:
            selection.reasons.append((sequence.request_id, reason))
            break
        if not selection.picks[-1].completes and ledger.config.role is Role.NORMAL:
            break
    return selection


def plan_prefill(ledger: Ledger) -> PrefillPlan:
    """Remove the dead, select, and take memory for what was selected; picked prompts leave the waiting queue."""
    finished = ledger.collect_finished() if ledger.config.role is Role.PROMPT else []
    dropped = ledger.sweep_waiting() if ledger.rules.purge_before_vote else []
    selection = select(ledger)
    gone = {id(pick.sequence) for pick in selection.picks}
    gone.update(id(sequence) for sequence, _ in selection.removed)
    if gone:
        ledger.waiting = deque(sequence for sequence in ledger.waiting if id(sequence) not in gone)
    for sequence, refusal in selection.removed:
        dropped.append(ledger.refuse(sequence, refusal) if refusal else ledger.drop(sequence))
    items, admitted = [], []
    for sequence, rows, completes, next_checkpoint in selection.picks:
        if not sequence.holds_memory:
            ledger.take(sequence)
            admitted.append(sequence)
        sequence.next_checkpoint = next_checkpoint
        sequence.schedule_count += 1
        if completes and ledger.config.role is Role.NORMAL:
            ledger.take_draft_slot(sequence)
        items.append(PlanItem(sequence, sequence.cached, rows, completes, write_slot=sequence.draft_slot))
    count_overtaken(ledger.waiting, admitted)
    return PrefillPlan(items, finished, dropped, selection.reasons)


def _opening_budget(ledger: Ledger) -> Budget:
    config, rules = ledger.config, ledger.rules
    cost = None if config.step_time_us == STEP_TIME_OFF else ledger.prefill_cost.coefficients
    counted = len(ledger.running) + (len(ledger.handoff) if rules.count_handoffs else 0)
    return Budget(
        rows=config.step_tokens_max,
        keys=rules.sum_k_max,
        sequences=config.sequences_max - counted,
        blocks=ledger.blocks.free_count,
        slots=ledger.slots.free_count,
        admits_new=config.role is not Role.NORMAL or ledger.is_below_watermark(),
        cost=cost,
        time_us=_time_for_chunks(ledger, cost) if cost else 0.0,
    )


def _time_for_chunks(ledger: Ledger, cost: Coefficients) -> float:
    config = ledger.config
    if config.step_time_us == STEP_TIME_AUTO:
        return cost.of_chunk(Chunk(config.step_tokens_max, 0))
    return config.step_time_us - cost.start


def _room(ledger: Ledger, sequence: Sequence, budget: Budget, is_first: bool) -> int:
    """Rows that the sequence may have: what the step's rows and its time leave, in whole multiples of the alignment.

    The first chunk has a block's rows however long they take: a prompt must get on.
    """
    rows, alignment = budget.rows, ledger.rules.chunk_alignment
    if budget.cost is not None:
        least = ledger.config.cache.block_tokens if is_first else 0
        rows = int(min(rows, max(least, budget.cost.rows_within(budget.time_us, sequence.cached))))
    return rows // alignment * alignment


def _why_no_memory(ledger: Ledger, sequence: Sequence, budget: Budget) -> str:
    if not budget.admits_new:
        return "new prompts wait for memory"
    if ledger.blocks_of(sequence.len) > budget.blocks:
        return f"needs {ledger.blocks_of(sequence.len)} blocks, {budget.blocks} are free"
    return "" if budget.slots else "no slot is free"


def _pick(ledger: Ledger, sequence: Sequence, budget: Budget, selection: Selection) -> str:
    """Add the sequence's next chunk to the selection, or say which limit ends the step."""
    rules, config = ledger.rules, ledger.config
    if budget.sequences < 1:
        return f"{config.sequences_max} sequences run"
    if rules.charge_whole_prompt and budget.keys < sequence.len:
        return f"whole prompt passes the key limit of {rules.sum_k_max}"
    room = _room(ledger, sequence, budget, is_first=not selection.picks)
    cut = cut_chunk(sequence, room, budget.rows, is_first=not selection.picks, may_cut=rules.chunked_prefill)
    rows, whole = cut.rows, sequence.len - sequence.cached
    if rows < max(rules.lookahead_tokens, 1):
        assert selection.picks or rows or rules.lookahead_tokens > 1, (
            f"{sequence.request_id} cannot be cut at {sequence.cached}: nothing fits an empty step of {budget.rows}"
        )
        return f"{rows} tokens would fit"
    if rows < whole and not rules.chunked_prefill:
        return f"{whole} tokens do not fit whole"
    keys = sequence.len if rules.charge_whole_prompt else sequence.cached + rows
    if keys > budget.keys:
        return f"{keys} keys pass the limit of {rules.sum_k_max}"
    budget.keys -= keys
    budget.rows -= align_up(rows, rules.chunk_alignment)
    if budget.cost is not None:
        budget.time_us -= budget.cost.of_chunk(Chunk(rows, sequence.cached))
    assert budget.rows >= 0, f"{sequence.request_id} overdraws the step by {-budget.rows} rows"
    if not sequence.holds_memory:
        budget.blocks -= ledger.blocks_of(sequence.len)
        budget.slots -= 1
    if rows == whole:
        budget.sequences -= 1
    selection.picks.append(Pick(sequence, rows, rows == whole, cut.next_checkpoint))
    return ""
