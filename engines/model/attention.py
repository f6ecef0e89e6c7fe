"""Attention of one layer on given keys: projections, one softmax over window, entries and sink, grouped output.

Source: published model.py (Attention, sparse_attn). Keys are values too: one latent of head_dim channels a token.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import Numerics, product
from shoal.engines.model.parameters import AttentionWeights
from shoal.engines.model.rope import Phases, rotate_rounded
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """What n query rows of B sequences attend to.

    shared [B, K, D] are keys of all rows of a sequence (the window, and entries where all are read), seen where
    shared_mask bool [B, n, K] says; entries [B, n, k, D] are each row's own choice, seen where entry_mask bool
    [B, n, k] says, or None. Unseen values must be finite: their weight is zero.
    """

    shared: Tensor
    shared_mask: Tensor
    entries: Tensor | None = None
    entry_mask: Tensor | None = None


def project(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> tuple[Tensor, Tensor]:
    """Query latents [T, q rank] and window KV [T, D] (rotated, not yet quantised) of normed rows [T, H]."""
    both = numerics.linear(x, weights.wqkv_a)
    latents, kv = both.split((weights.q_norm.shape[0], weights.kv_norm.shape[0]), dim=-1)
    return numerics.round_(rms_norm(latents, weights.q_norm, eps)), _normed_kv(numerics, kv, weights, by, eps)


def window_kv(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> Tensor:
    """Window KV [T, D] of rows [T, H]; the drafter makes its main entries with it alone."""
    return _normed_kv(numerics, numerics.linear(x, weights.wkv), weights, by, eps)


def _normed_kv(numerics: Numerics, kv: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> Tensor:
    return rotate_rounded(numerics, numerics.round_(rms_norm(kv, weights.kv_norm, eps)), by)


def queries(numerics: Numerics, latents: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """Rotated queries [..., heads, D] of query latents [..., q rank]."""
    q = numerics.linear(latents, weights.wq_b).unflatten(-1, (weights.sink.shape[0], -1))
    return rotate_rounded(numerics, q, by.unsqueeze(-2))


def attend(q: Tensor, keys: Keys, sink: Tensor) -> Tensor:
    """Attention output [B, n, heads, D] of queries [B, n, heads, D]; a row that sees nothing gives zero.

    The sink joins the denominator only. Scores of window and entries share one softmax, so a token may count twice.
    """
    scale = q.shape[-1] ** -0.5
    scores = torch.bmm(q.flatten(1, 2), keys.shared.transpose(1, 2)).view(*q.shape[:3], -1).mul_(scale)
    scores.masked_fill_(~keys.shared_mask.unsqueeze(2), -torch.inf)
    if keys.entries is None or keys.entry_mask is None:
        weights, total = _exponentials(scores, sink)
        return torch.bmm(weights.flatten(1, 2), keys.shared).view(q.shape).div_(total)
    own = keys.entries.flatten(0, 1)
    on_own = torch.bmm(q.flatten(0, 1), own.transpose(1, 2)).view(*q.shape[:3], -1).mul_(scale)
    on_own.masked_fill_(~keys.entry_mask.unsqueeze(2), -torch.inf)
    weights, total = _exponentials(torch.cat((scores, on_own), dim=-1), sink)
    on_shared, on_own = weights.split((scores.shape[-1], on_own.shape[-1]), dim=-1)
    output = torch.bmm(on_shared.flatten(1, 2), keys.shared).view(q.shape)
    output += torch.bmm(on_own.flatten(0, 1), own).view(q.shape)
    return output.div_(total)


def _exponentials(scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax numerators, in place of scores [..., heads, K], and the denominators [..., heads, 1] with the sink."""
    top = torch.maximum(scores.amax(-1), sink)
    weights = scores.sub_(top.unsqueeze(-1)).exp_()
    return weights, (weights.sum(-1) + torch.exp(sink - top)).unsqueeze(-1)


def output(numerics: Numerics, attended: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """The layer's output [..., H] of attention [..., heads, D]: turned back at the query's position, then grouped.

    `attended` is overwritten.
    """
    turned = rotate_rounded(numerics, numerics.round_(attended), by.inverse().unsqueeze(-2))
    groups = weights.wo_a.shape[0]
    grouped = turned.flatten(-2).chunk(groups, dim=-1)
    low = torch.cat([product(x, weight) for x, weight in zip(grouped, weights.wo_a, strict=True)], dim=-1)
    return numerics.linear(numerics.round_(low), weights.wo_b)
