"""Score prompt tokens: log-probability, rank and alternatives at each row of a prefill chunk, a few rows at a time."""

from collections.abc import Callable, Sequence

import torch
from shoal.engines.core.plan import PlanItem
from shoal.engines.core.request import PromptScore, PromptScores
from shoal.engines.run.sampler import LOGPROB_FLOOR
from torch import Tensor

ROWS_MAX = 128
"""Rows whose logits are held at once: 128 x 129,280 floats are 63 MiB, whatever the chunk."""


def prompt_scores(
    items: Sequence[PlanItem], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[PromptScores, ...]:
    """Scores of the tokens behind the rows of scored items, hidden [all their rows, H] end to end.

    The row at position p scores the prompt's token p + 1; rows behind the prompt's last but one score nothing.
    """
    found, first = [], 0
    for item in items:
        request = item.sequence.request
        targets = item.sequence.token_slice(item.start + 1, min(item.end + 1, item.prompt_len))
        scores: list[PromptScore] = []
        for at in range(0, len(targets), ROWS_MAX):
            piece = targets[at : at + ROWS_MAX]
            logits = logits_of(hidden[first + at : first + at + len(piece)])
            scores += score(logits, piece, request.prompt_logprobs or 0)
        if scores:
            found.append(PromptScores(item.request_id, item.start + 1, tuple(scores)))
        first += item.rows
    return tuple(found)


def score(logits: Tensor, targets: Sequence[int], alternatives: int) -> list[PromptScore]:
    """Scores of one target token a row, logits float [rows, vocab]; ties among alternatives go by lower id."""
    logprobs = torch.log_softmax(logits.double(), dim=-1).nan_to_num(nan=LOGPROB_FLOOR).clamp_min(LOGPROB_FLOOR)
    own = logprobs.gather(1, torch.tensor(targets, device=logits.device).unsqueeze(1))
    ranks = (1 + (logprobs > own).sum(-1)).tolist()
    count = min(alternatives, logits.shape[-1])
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(targets)
    if count:
        values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
        tops = [tuple(zip(row_ids, row, strict=True)) for row_ids, row in pairs]
    return [PromptScore(*one) for one in zip(own.squeeze(1).tolist(), ranks, tops, strict=True)]
