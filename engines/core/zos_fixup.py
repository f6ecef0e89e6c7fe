"""What the host learns of a step that was planned behind an open one, once that one is committed."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from shoal.engines.core.plan import Plan, PlanItem


def fix_up(plan: Plan, rows: Seq[int] | None) -> Plan:
    """The plan with true starts, the device's rows and the draft slots to read (engine runtime notes 6.6).

    `rows`: as the device spread them, None if it did not. Raises ValueError if they are not a spread of the plan's.
    A sequence that ended meanwhile keeps its item, whose result is dropped, and reads no drafts.
    """
    counts = [item.rows for item in plan.items] if rows is None else list(rows)
    most = max((1 + len(item.sequence.drafts) for item in plan.items), default=1)
    if len(counts) != len(plan.items) or sum(counts) != plan.rows or not all(1 <= count <= most for count in counts):
        raise ValueError(f"rows = {counts} must spread {plan.rows} rows over {len(plan.items)} items, 1..{most} each")
    items = tuple(_exact(item, count) for item, count in zip(plan.items, counts, strict=True))
    return replace(plan, items=items, behind=0)


def _exact(item: PlanItem, rows: int) -> PlanItem:
    sequence = item.sequence
    read_slot = 0 if sequence.is_finished else item.read_slot
    if sequence.has_draft_info:
        read_slot = sequence.draft_slot
        sequence.has_draft_info = False
    return PlanItem(sequence, sequence.cached, rows, True, read_slot, item.write_slot)
