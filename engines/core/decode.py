"""Plan a decode step: collect what finished, admit what arrived, and keep everyone in blocks or preempt."""

from collections import deque
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

from shoal.engines.core.drafts import VerifyChooser
from shoal.engines.core.fork import give_up, may_settle, settle
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
    finished += _admit(ledger, dropped)
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
    most = 1 + ledger.rules.drafts  # tokens that an open step may bring
    items = []
    for sequence, count in zip(scheduled, rows, strict=True):
        read_slot = sequence.draft_slot if sequence.has_draft_info else 0
        start = sequence.cached + sequence.open_steps * most
        items.append(PlanItem(sequence, start, count, True, read_slot, sequence.draft_slot))
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


def _admit(ledger: Ledger, dropped: list[Ended]) -> list[Ended]:
    """Move arrived sequences into decode while there is room; returns those that died meanwhile."""
    finished = []
    while ledger.arrived and len(ledger.running) < ledger.config.sequences_max:
        sequence = ledger.arrived[0]
        if sequence.is_sharing and not sequence.is_finished and not may_settle(ledger, sequence):
            if _makes_room(ledger) or not ledger.rules.adopt_when_sole:
                break
            ledger.arrived.popleft()
            if not give_up(ledger, sequence):
                dropped.append(ledger.drop(sequence))
            continue
        ledger.arrived.popleft()
        if sequence.is_finished:
            finished.append(ended(sequence))
            continue
        if sequence.is_sharing:
            settle(ledger, sequence)
        sequence.move(Phase.RUNNING)
        ledger.take_draft_slot(sequence)
        sequence.drafts = ledger.pads
        ledger.running.append(sequence)
    return finished


def _makes_room(ledger: Ledger) -> bool:
    """Whether memory will come back without anybody's help: somebody runs, or has ended and still owns some."""
    dead = [sequence for sequence in ledger.arrived if sequence.is_finished]
    if dead:  # behind the head: they come first, for then they leave
        ledger.arrived = deque([*dead, *(s for s in ledger.arrived if not s.is_finished)])
    owners = ledger.sequences.values()
    return any(s.block_table and (s.is_finished or s.phase is Phase.RUNNING) for s in owners)


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
        needed = sequence.len + sequence.open_steps * (1 + drafts) + drafts
        short = needed > len(sequence.block_table) * block_tokens
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
                assert needed <= room, f"{sequence.request_id}: {needed} tokens, room for {room}"
            elif needed <= (len(sequence.block_table) - 1) * block_tokens:
                _free_surplus(ledger, sequence, needed)
            scheduled.append(sequence)
        behind -= 1
    return scheduled, victims


def _free_surplus(ledger: Ledger, sequence: Sequence, needed: int) -> None:
    """Give back blocks that were taken ahead for drafts which were not accepted; no open step reaches into them."""
    keep = ledger.blocks_of(needed)
    ledger.blocks.free(sequence.block_table[keep:])
    sequence.block_table = sequence.block_table[:keep]


def _preempt(ledger: Ledger, sequence: Sequence) -> Sequence:
    """Take a running sequence's memory: it waits at the head to be computed again, or ends where that cannot be."""
    ledger.give_back(sequence)
    if ledger.may_recompute(sequence):
        sequence.restart()
        ledger.waiting.appendleft(sequence)
    else:
        sequence.finish(FinishReason.PREEMPTED, "its blocks were needed by sequences with less output")
    return sequence
