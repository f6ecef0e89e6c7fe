"""Choose the next token of each row: filters, draw and log-probabilities, independent of batch and row order.

Source: engine-side order of operations (temperature, top-p, top-k on one stable descending order, ties by lower id)
and fixed-point weights floor(p * 2**31). Probabilities are float64 and every sum that decides a token is an integer
sum, so a row's result is the same bits in any batch. Every filter keeps a prefix of the same order, hence the kept
set is the shortest of them. min-p (not in that source) keeps tokens with p >= min_p * largest p, as vLLM users expect.

Log-probabilities are of the final distribution: tempered, filtered, renormalised. At temperature 0 that limit is a
single token and says nothing, so greedy rows report the untempered distribution instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from shoal.engines.core.request import SamplingParams, TokenLogprobs
from shoal.engines.run.rng import DRAW, SEED_MASK, Words, below, random_words
from torch import Tensor

GREEDY_BELOW = 1e-5
FIXED_ONE = 1 << 31
LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome. `is_valid` is false when the logits hold NaN or no finite value; the token is then 0."""

    token_id: int
    logprobs: TokenLogprobs | None
    is_valid: bool = True


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[Sampled, ...]:
    """Sample one token a row.

    Args:
        logits: float [rows, vocab].
        params: one entry a row.
        positions: absolute position of the token being drawn, one a row; the random stream depends on nothing else
            but the seed.
    """
    rows = logits.shape[0]
    assert rows == len(params) == len(positions), f"{rows} logit rows, {len(params)} params, {len(positions)} positions"
    if rows == 0:
        return ()
    scores, valid = finite(logits)
    greedy = torch.tensor([p.temperature < GREEDY_BELOW for p in params])
    if bool(greedy.all()) and all(p.logprobs is None for p in params):
        pairs = zip(first_largest(scores).tolist(), valid.tolist(), strict=True)
        return tuple(Sampled(i, None) if ok else Sampled(0, None, is_valid=False) for i, ok in pairs)
    logprobs = final_logprobs(scores, params, greedy)
    tokens = torch.where(greedy, first_largest(scores), draw(logprobs, params, positions))
    ids = tokens.tolist()
    return tuple(
        Sampled(ids[i], report(logprobs[i], ids[i], params[i].logprobs)) if ok else Sampled(0, None, is_valid=False)
        for i, ok in enumerate(valid.tolist())
    )


def finite(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocab] as float64 on the host, and which rows have any to choose from; 0 in the others."""
    scores = logits.detach().to("cpu", torch.float64)
    valid = ~torch.isnan(scores).any(-1) & torch.isfinite(scores.amax(-1))
    return torch.where(valid[:, None], scores, torch.zeros_like(scores)), valid


def first_largest(scores: Tensor) -> Tensor:
    """Lowest id among the largest values: int64 [rows]. (argmax does not promise which of several maxima it gives.)"""
    ids = torch.arange(scores.shape[-1])
    is_largest = scores == scores.amax(-1, keepdim=True)
    return torch.where(is_largest, ids, scores.shape[-1]).amin(-1)


def final_logprobs(scores: Tensor, params: Sequence[SamplingParams], greedy: Tensor) -> Tensor:
    """Log-probabilities after temperature and filters, -inf where cut: float64 [rows, vocab]."""
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    tempered = scores / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    logprobs = torch.log_softmax(tempered, -1)
    filtered = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0)]
    if filtered:
        chosen = [params[i] for i in filtered]
        cut = ~kept(logprobs[filtered], chosen)
        logprobs[filtered] = torch.log_softmax(tempered[filtered].masked_fill(cut, -torch.inf), -1)
    return logprobs


def kept(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens every filter of their row keeps: bool [rows, vocab]; the most likely token always stays."""
    vocab = logprobs.shape[-1]
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    weights = fixed_point(ordered)
    before = weights.cumsum(-1) - weights
    mass = torch.tensor([int(p.top_p * FIXED_ONE) + 1 if p.top_p < 1.0 else FIXED_ONE + 1 for p in params])
    count = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params])
    ratio = torch.tensor([p.min_p for p in params], dtype=torch.float64).log()
    stays = before < mass[:, None]
    stays &= torch.arange(vocab) < count[:, None]
    stays &= ordered >= ordered[:, :1] + ratio[:, None]
    stays[:, 0] = True
    return torch.zeros_like(stays).scatter_(-1, order, stays)


def fixed_point(logprobs: Tensor) -> Tensor:
    """Integer weights floor(p * 2**31): int64, same shape; a cut token weighs 0."""
    return (logprobs.exp() * FIXED_ONE).floor().to(torch.int64)


def draw(logprobs: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], seed_offset: int = 0) -> Tensor:
    """A weighted choice a row, weight 0 never drawn: int64 [rows]."""
    seeds = np.array([(p.seed + seed_offset) & SEED_MASK for p in params], dtype=np.uint64)
    return choose(fixed_point(logprobs), random_words(seeds, np.array(positions, dtype=np.uint64), DRAW))


def choose(weights: Tensor, words: Words) -> Tensor:
    """The token of each row that a random word picks by integer weights int64 [rows, vocab]: int64 [rows]."""
    sums = weights.cumsum(-1)
    targets = torch.from_numpy(below(words, sums[:, -1].clamp(min=1).numpy()))
    # The first place whose running sum exceeds the target; a flat distribution over more than 2**31 tokens would
    # have total 0, which no vocabulary reaches.
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def report(logprobs: Tensor, token_id: int, alternatives: int | None) -> TokenLogprobs | None:
    """What the client asked to see of one row: the token's own value and the `alternatives` best, ties by lower id."""
    if alternatives is None:
        return None
    token = max(float(logprobs[token_id]), LOGPROB_FLOOR)
    count = min(alternatives, logprobs.shape[-1])
    if count == 0:
        return TokenLogprobs(token)
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    pairs = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
    return TokenLogprobs(token, tuple((i, max(v, LOGPROB_FLOOR)) for i, v in pairs))
