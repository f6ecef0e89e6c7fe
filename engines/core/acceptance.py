"""Which drafts of one sequence count, and the token after them: the longest prefix of accepted rows."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

NOT_FORCED = -1


class Verified(NamedTuple):
    """The drafts that are output, in order, and the token sampled in the first row that was not accepted."""

    accepted: tuple[int, ...]
    sampled: int


def accepted_prefix(
    drafts: Seq[int], is_accepted: Seq[bool], candidates: Seq[int], forced: Seq[int] | None = None
) -> Verified:
    """Combine the rows of one sequence (engine runtime notes 8.5).

    With R rows: drafts [R - 1] to be verified, is_accepted [>= R - 1] of each by its own row alone, candidates [R] the
    token a row outputs (the draft, a residual sample, or the fresh sample in the last row). forced [R]: an id >= 0
    takes the place of a row's candidate, and decides acceptance by being the draft.
    """
    given = (NOT_FORCED,) * len(candidates) if forced is None else forced
    for row, draft in enumerate(drafts):
        is_forced = given[row] > NOT_FORCED
        if not (given[row] == draft if is_forced else is_accepted[row]):
            return Verified(tuple(drafts[:row]), given[row] if is_forced else candidates[row])
    last = given[len(drafts)]
    return Verified(tuple(drafts), last if last > NOT_FORCED else candidates[len(drafts)])
