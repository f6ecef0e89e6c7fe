"""Accept or reject drafts row by row so that what is output has exactly the model's own distribution.

Source: engine runtime notes 8.5. A draft t drawn from p is accepted with probability min(1, q(t) / p(t)), q being the
model's; a rejected one is replaced by a draw from the normalised positive part of q - p. At temperature 0 both are
single tokens, so a draft is accepted exactly if it is the model's choice.

Every random word belongs to the position of the token it decides. A position may be judged again, in a later step
behind a rejection; what was drawn for it before was thrown away whatever it was, so the words are still independent
of everything that was output, and the stream depends on neither batch nor hand-off.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from shoal.engines.core.request import SamplingParams
from shoal.engines.run.rng import ACCEPT, DRAW, RESIDUAL, SEED_MASK, random_words, unit
from shoal.engines.run.sampler import (
    FIXED_ONE,
    GREEDY_BELOW,
    choose,
    draw,
    final_logprobs,
    finite,
    first_largest,
    fixed_point,
)
from torch import Tensor

FRESH = -1


class Judged(NamedTuple):
    """R rows by themselves: bool [R] accepted; int64 [R] the token a row outputs if it is not; bool [R] finite logits.

    logprobs float64 [R, V] of the final distributions, None where nobody asks and nothing was drawn.
    """

    accepted: Tensor
    tokens: Tensor
    valid: Tensor
    logprobs: Tensor | None


def judge(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], drafts: Tensor, proposals: Tensor
) -> Judged:
    """Judge each row alone; which rows count is the prefix rule's business.

    logits: float [R, V]. positions: of the token that each row decides. drafts: int64 [R], FRESH for a row that
    verifies nothing. proposals: float [R, V], log-distribution that the draft was drawn from, -inf in fresh rows.
    """
    scores, valid = finite(logits)
    best = first_largest(scores)
    greedy = torch.tensor([p.temperature < GREEDY_BELOW for p in params])
    if bool(greedy.all()) and all(p.logprobs is None for p in params):
        return Judged(drafts == best, best, valid, None)
    logprobs = final_logprobs(scores, params, greedy)
    seeds = np.array([p.seed & SEED_MASK for p in params], dtype=np.uint64)
    counters = np.array(positions, dtype=np.uint64)
    is_fresh, proposals = drafts == FRESH, proposals.double()
    at = drafts.clamp_min(0).unsqueeze(1)
    ratio = (logprobs.gather(1, at) - proposals.gather(1, at)).squeeze(1).clamp_max(0.0).exp()
    uniform = torch.from_numpy(unit(random_words(seeds, counters, ACCEPT)))
    accepted = ~is_fresh & torch.where(greedy, drafts == best, uniform < ratio)
    words = np.where(is_fresh.numpy(), random_words(seeds, counters, DRAW), random_words(seeds, counters, RESIDUAL))
    drawn = choose(residual_weights(logprobs, proposals, is_fresh), words)
    return Judged(accepted, torch.where(greedy, best, drawn), valid, logprobs)


def judge_by_draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], drafts: Tensor) -> Judged:
    """Judge each row alone by the token that the sampler draws there: a draft is accepted exactly if it is that one.

    Arguments as of `judge`. Output is what an engine without drafts puts out, word for word, so it has the model's
    distribution and depends on no drafter, number of drafts or earlier rejection (drafter-invariant speculative
    decoding: Daliri, Musco, Suresh 2024). A drafter that draws with the same words is right the more often for it.
    """
    scores, valid = finite(logits)
    best = first_largest(scores)
    greedy = torch.tensor([p.temperature < GREEDY_BELOW for p in params])
    if bool(greedy.all()) and all(p.logprobs is None for p in params):
        return Judged(drafts == best, best, valid, None)
    logprobs = final_logprobs(scores, params, greedy)
    tokens = torch.where(greedy, best, draw(logprobs, params, positions))
    return Judged(drafts == tokens, tokens, valid, logprobs)


def residual_weights(logprobs: Tensor, proposals: Tensor, is_fresh: Tensor) -> Tensor:
    """Integer weights int64 [R, V] of what is left of q where p was rejected; of q itself in fresh rows.

    Where nothing is left (q = p, and only rounding can have rejected) they are those of q.
    """
    whole = fixed_point(logprobs)
    rest = (logprobs.exp() - proposals.exp()).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    part = (rest / mass * FIXED_ONE).nan_to_num(0.0).floor().to(torch.int64)
    return torch.where(is_fresh.unsqueeze(1) | (mass <= 0.0), whole, part)
