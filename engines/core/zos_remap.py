"""What a decode step planned behind an open one tells the device: where its rows were in the step before, and lengths.

Zero-overhead scheduling (engine runtime notes 6): the host plans step N while step N-1 computes, as if N-1 accepted
every draft. The device knows better when N starts, so it corrects lengths and takes tokens from N-1's results.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from shoal.engines.core.plan import Plan, PlanItem

ABSENT = -1


class Remap(NamedTuple):
    """One entry a row of the device's step, padding rows last (ABSENT, 1, 1).

    `previous`: index of the row's sequence in the step before, ABSENT = it was not there (fresh). `q`: query rows.
    `base`: optimistic key length without the query rows (k - q); without drafts, k itself, which is certain then.
    """

    previous: tuple[int, ...]
    q: tuple[int, ...]
    base: tuple[int, ...]


def remap_rows(
    previous: Seq[Hashable], current: Seq[tuple[Hashable, int, int]], rows: int, drafts: int
) -> Remap | None:
    """Find the sequences of this step, (key, q, k) each, in the step before (notes 6.3); None if no one was there.

    `rows` counts the device's rows, graph padding included: at least one a sequence.
    """
    keys = [key for key, _, _ in current]
    if keys == list(previous):
        found = list(range(len(keys)))
    else:
        index = {key: i for i, key in enumerate(previous)}
        found = [index.get(key, ABSENT) for key in keys]
    if not any(i != ABSENT for i in found):
        return None
    padding = rows - len(keys)
    assert padding >= 0, f"{len(keys)} sequences do not fit {rows} rows"
    return Remap(
        (*found, *[ABSENT] * padding),
        (*(q for _, q, _ in current), *[1] * padding),
        (*(k - q if drafts else k for _, q, k in current), *[1] * padding),
    )


def remap_plans(previous: Plan, plan: Plan, rows: int, drafts: int) -> Remap | None:
    """The remap of a decode plan as it was made, before its fix-up; None where nothing needs a correction."""
    current = [(item.sequence, item.rows, item.end) for item in plan.items]
    return remap_rows([item.sequence for item in previous.items], current, rows, drafts) if plan.behind else None


def lookback_window(item: PlanItem, is_fresh: bool, drafts: int, reach: int) -> tuple[int, ...]:
    """Up to reach + drafts ids, newest last, in which the device finds what came before the item's rows (notes 6.5).

    Of a sequence in the step before: its committed ids, then the drafts that step verifies. Of a fresh one: the ids
    before its first row, then as many zeros as there are drafts, which nobody reads.
    """
    sequence = item.sequence
    if is_fresh:
        return item.lookback(reach) + (0,) * drafts
    return sequence.token_slice(max(0, sequence.len - reach), sequence.len) + sequence.drafts
