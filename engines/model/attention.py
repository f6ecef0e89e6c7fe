"""Attention of one layer on given keys: projections, one softmax over window, entries and sink, grouped output.

Source: published model.py (Attention, sparse_attn). Keys are values too: one latent of head_dim channels a token.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import Numerics, dot_products, product
from shoal.engines.model.parameters import AttentionWeights
from shoal.engines.model.rope import Phases, rotate_rounded
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """What n query rows of B sequences attend to.

    shared [B, K, D] are keys of all rows of a sequence (the window, and entries where all are read), seen where
    shared_mask bool [B, n, K] says; entries [B, n, k, D], if any, are each row's own choice, seen where entry_mask
    bool [B, n, k] says. Without a mask all are seen. Unseen values must be finite: their weight is zero.
    """

    shared: Tensor
    shared_mask: Tensor | None
    entries: Tensor | None = None
    entry_mask: Tensor | None = None


def project(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> tuple[Tensor, Tensor]:
    """Query latents [T, q rank] and window KV [T, D] (rotated, not yet quantised) of normed rows [T, H]."""
    both, rank = numerics.linear(x, weights.wqkv_a), weights.q_norm.shape[0]
    latents = numerics.round_(rms_norm(both[..., :rank], weights.q_norm, eps))
    return latents, _normed_kv(numerics, both[..., rank:], weights, by, eps)


def window_kv(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> Tensor:
    """Window KV [T, D] of rows [T, H]; the drafter makes its main entries with it alone."""
    return _normed_kv(numerics, numerics.linear(x, weights.wkv), weights, by, eps)


def _normed_kv(numerics: Numerics, kv: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> Tensor:
    return rotate_rounded(numerics, numerics.round_(rms_norm(kv, weights.kv_norm, eps)), by)


def queries(numerics: Numerics, latents: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """Rotated queries [..., heads, D] of query latents [..., q rank]."""
    q = numerics.linear(latents, weights.wq_b).view(*latents.shape[:-1], weights.sink.shape[0], -1)
    return rotate_rounded(numerics, q, by.unsqueeze(-2))


def attend(q: Tensor, keys: Keys, sink: Tensor) -> Tensor:
    """Attention output [B, n, heads, D] of queries [B, n, heads, D]; a row that sees nothing gives zero.

    The sink joins the denominator only. Scores of window and entries share one softmax, so a token may count twice.
    """
    on_shared = _scores(q.flatten(1, 2), keys.shared, keys.shared_mask, q)
    column = sink.view(-1, 1).expand(*q.shape[:3], 1)
    count = keys.shared.shape[1]
    if keys.entries is None:
        weights = torch.softmax(torch.cat((on_shared, column), dim=-1), dim=-1)
        return torch.bmm(weights[..., :count].flatten(1, 2), keys.shared).view(q.shape)
    own = keys.entries.flatten(0, 1)
    on_own = _scores(q.flatten(0, 1), own, keys.entry_mask, q)
    weights = torch.softmax(torch.cat((on_shared, on_own, column), dim=-1), dim=-1)
    output = torch.bmm(weights[..., :count].flatten(1, 2), keys.shared).view(q.shape)
    output += torch.bmm(weights[..., count:-1].flatten(0, 1), own).view(q.shape)
    return output


def _scores(rows: Tensor, keys: Tensor, mask: Tensor | None, q: Tensor) -> Tensor:
    """Scaled products [B, n, heads, K] of the queries q with keys, both in the batches of `rows`; -inf if not seen."""
    scores = dot_products(rows, keys).view(*q.shape[:3], -1).mul_(q.shape[-1] ** -0.5)
    return scores if mask is None else scores.masked_fill_(~mask.unsqueeze(2), -torch.inf)


def output(numerics: Numerics, attended: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """The layer's output [..., H] of attention [..., heads, D]: turned back at the query's position, then grouped.

    `attended` is overwritten.
    """
    turned = rotate_rounded(numerics, numerics.round_(attended), by.inverse().unsqueeze(-2))
    grouped = turned.flatten(-2).chunk(len(weights.wo_a), dim=-1)
    low = torch.cat([product(x, weight) for x, weight in zip(grouped, weights.wo_a, strict=True)], dim=-1)
    return numerics.linear(numerics.round_(low), weights.wo_b)
