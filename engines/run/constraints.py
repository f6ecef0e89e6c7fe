"""Matchers of the requests an engine holds, and their masks on a step's logits before sampling."""

from collections.abc import Iterator, Sequence

import torch
from shoal.engines.core.grammar.matcher import Grammar, GrammarError, Mask, Matcher, unpack
from shoal.engines.core.plan import PlanItem
from shoal.engines.core.request import EngineRequest
from torch import Tensor


class Constraints:
    """By request id. A matcher follows what is committed of its output, so it needs nothing from earlier engines or
    steps: a re-routed, handed-off or recomputed sequence brings it to where it was."""

    def __init__(self, vocabulary: int = 0, eos_token_id: int = 0, drafts: int = 0) -> None:
        self._vocabulary = vocabulary
        self._eos = eos_token_id
        self._rollback_max = drafts + 2
        self._matchers: dict[str, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._matchers

    def add(self, request: EngineRequest, grammar: Grammar) -> None:
        """Constrain a request's output by its grammar, which is at its beginning."""
        assert request.grammar is not None, f"{request.request_id} asks for no grammar"
        self._matchers[request.request_id] = Matcher(
            grammar, request.grammar, self._eos, self._vocabulary, self._rollback_max
        )

    def branch(self, parent_id: str, request: EngineRequest) -> None:
        """Constrain a branch as its parent is, if it is; the parent's output has not been followed yet."""
        if (matcher := self._matchers.get(parent_id)) is not None:
            self.add(request, matcher.beginning())

    def drop(self, request_id: str) -> None:
        """Forget a request, constrained or not."""
        self._matchers.pop(request_id, None)

    def masks(self, item: PlanItem, drafts: Sequence[int] = ()) -> list[Mask | None] | str:
        """Masks of an item's rows, row k for the token behind draft k (None: all allowed), or why it cannot go on.

        For a constrained item only. Its matcher takes over what was committed since the last call.
        """
        matcher, sequence = self._matchers[item.request_id], item.sequence
        if not matcher.follow(sequence.token_slice(sequence.prompt_len + matcher.followed, sequence.len)):
            return matcher.failure
        try:
            rows = matcher.masks(drafts)
        except GrammarError as error:
            return f"the grammar failed: {error}"
        if rows[0] is not None and not rows[0].any():
            return f"the grammar allows no token after {matcher.followed} output tokens"
        return rows

    def apply(self, items: Sequence[PlanItem], logits: Tensor) -> Iterator[tuple[str, str]]:
        """Rule out, in place, what the items' grammars forbid: row i of logits [items, vocab] belongs to item i.

        Yields (request id, reason) for each item whose matcher failed; its row says nothing. Without constrained
        requests this costs nothing, and other rows are not touched.
        """
        if not self._matchers:
            return
        for row, item in enumerate(items):
            if item.request_id not in self._matchers:
                continue
            masks = self.masks(item)
            if isinstance(masks, str):
                yield item.request_id, masks
            elif masks[0] is not None:
                forbid(logits[row], masks[0])

    def apply_rows(self, items: Sequence[PlanItem], logits: Tensor) -> Iterator[tuple[str, str]]:
        """As `apply`, for all rows of decode items, logits [rows, vocab]: each row behind the drafts before it.

        Rows behind a draft that is not allowed say nothing; that draft is not accepted, so they do not count.
        """
        if not self._matchers:
            return
        first = 0
        for item in items:
            if item.request_id in self._matchers:
                masks = self.masks(item, item.token_ids[1:])
                if isinstance(masks, str):
                    yield item.request_id, masks
                else:
                    for row, mask in enumerate(masks[: item.rows], first):
                        if mask is not None:
                            forbid(logits[row], mask)
            first += item.rows


def forbid(row: Tensor, mask: Mask) -> None:
    """Set the logits [vocab] of tokens that a mask does not allow to -inf, in place."""
    allowed = torch.from_numpy(unpack(mask, row.shape[-1]))
    row.masked_fill_(~allowed.to(row.device), -torch.inf)
