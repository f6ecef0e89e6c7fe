"""Plan a decode step: collect what finished, admit what arrived, and keep everyone in blocks or preempt."""

from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

from shoal.engines.config import Role
from shoal.engines.core.drafts import VerifyChooser
from shoal.engines.core.ledger import Ledger, ended
from shoal.engines.core.plan import Ended, PlanItem
from shoal.engines.core.request import FinishReason
from shoal.engines.core.sequence import Phase, Sequence

_len = attrgetter("len")


class DecodePlan(NamedTuple):
    """The decode part of a plan."""

    items: list[PlanItem]
    finished: list[Ended]
    dropped: list[Ended]
    preempted: list[str]


def plan_decode(ledger: Ledger, verify: VerifyChooser | None = None) -> DecodePlan:
    """Plan a row, and one a draft that `verify` chooses (without it every draft), for every running sequence.

    Engine runtime notes 4; the longest come first. Raises ValueError for a choice that cannot be.
    """
    finished = ledger.collect_finished()
    dropped = ledger.sweep_waiting()
    finished += _admit(ledger)
    # Stable, so ties keep their order and a plan does not depend on how the sort is implemented.
    candidates = sorted(ledger.running, key=lambda s: s.len - s.prompt_len, reverse=True)
    scheduled, victims = _keep_in_blocks(ledger, candidates)
    preempted = []
    for victim in victims:
        if victim.is_finished:
            dropped.append(ledger.drop(victim))
        else:
            preempted.append(victim.request_id)
    scheduled.sort(key=_len, reverse=True)
    ledger.running = scheduled
    assert len(scheduled) <= ledger.config.sequences_max, f"{len(scheduled)} sequences in a decode step"
    rows = _rows(scheduled, ledger.rules.drafts, verify)
    items = []
    for sequence, count in zip(scheduled, rows, strict=True):
        read_slot = sequence.draft_slot if sequence.has_draft_info else 0
        items.append(PlanItem(sequence, sequence.cached, count, True, read_slot, sequence.draft_slot))
        sequence.has_draft_info = False
        sequence.schedule_count += 1
    return DecodePlan(items, finished, dropped, preempted)


def _rows(scheduled: list[Sequence], drafts: int, verify: VerifyChooser | None) -> Seq[int]:
    """Rows of each sequence: its last token and the drafts to verify."""
    if verify is None or not scheduled:
        return [1 + drafts] * len(scheduled)
    rows = verify.choose(scheduled)
    if len(rows) != len(scheduled) or not all(1 <= count <= 1 + drafts for count in rows):
        raise ValueError(f"rows chosen = {list(rows)} must be one of 1..{1 + drafts} for each of {len(scheduled)}")
    return rows


def _admit(ledger: Ledger) -> list[Ended]:
    """Move arrived sequences into decode while there is room; returns those that died meanwhile."""
    finished = []
    while ledger.arrived and len(ledger.running) < ledger.config.sequences_max:
        sequence = ledger.arrived.popleft()
        if sequence.is_finished:
            finished.append(ended(sequence))
            continue
        sequence.move(Phase.RUNNING)
        ledger.take_draft_slot(sequence)
        sequence.drafts = ledger.pads
        ledger.running.append(sequence)
    return finished


def _keep_in_blocks(ledger: Ledger, candidates: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Append blocks, shortest output first; without a free one the longest output is preempted.

    Returns (scheduled, victims) in the order decided.
    """
    scheduled: list[Sequence] = []
    victims: list[Sequence] = []
    block_tokens = ledger.config.cache.block_tokens
    on_need, drafts = ledger.rules.preempt_on_need, ledger.rules.drafts
    pool = ledger.blocks
    longest, behind = 0, len(candidates)
    while longest < behind:
        sequence = candidates[behind - 1]
        short = sequence.len + drafts > len(sequence.block_table) * block_tokens
        wanted = 1 if short or not on_need else 0
        while pool.free_count < wanted and behind - longest > 1:
            victims.append(_preempt(ledger, candidates[longest]))
            longest += 1
        if pool.free_count < wanted:
            victims.append(_preempt(ledger, sequence))
        else:
            if short:
                sequence.block_table += pool.allocate(1)
                room = len(sequence.block_table) * block_tokens
                assert sequence.len + drafts <= room, f"{sequence.request_id}: {sequence.len} tokens, room for {room}"
            scheduled.append(sequence)
        behind -= 1
    return scheduled, victims


def _preempt(ledger: Ledger, sequence: Sequence) -> Sequence:
    """Take a running sequence's memory: it waits at the head to be computed again, or ends where that cannot be."""
    may_recompute = (
        ledger.config.recompute_preempted and ledger.config.role is Role.NORMAL and not sequence.is_constrained
    )
    ledger.give_back(sequence)
    if may_recompute:
        sequence.restart()
        ledger.waiting.appendleft(sequence)
    else:
        sequence.finish(FinishReason.PREEMPTED, "its blocks were needed by sequences with less output")
    return sequence
