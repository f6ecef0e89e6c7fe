"""Attention of one layer on given keys: projections, one softmax over window, entries and sink, grouped output.

Source: published model.py (Attention, sparse_attn). Keys are values too: one latent of head_dim channels a token.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import Numerics
from shoal.engines.model.parameters import AttentionWeights
from shoal.engines.model.rope import Phases, rotate
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """What n query rows of B sequences attend to.

    window [B, K, D] is shared by a sequence's rows and seen where window_mask bool [B, n, K] says; entries
    [B, n, k, D] are each row's own choice, seen where entry_mask bool [B, n, k] says. Unseen values must be finite.
    """

    window: Tensor
    window_mask: Tensor
    entries: Tensor
    entry_mask: Tensor


def project(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> tuple[Tensor, Tensor]:
    """Query latents [T, q rank] and window KV [T, D] (rotated, not yet quantised) of normed rows [T, H]."""
    latents = numerics.round(rms_norm(numerics.linear(x, weights.wq_a), weights.q_norm, eps))
    kv = window_kv(numerics, x, weights, by, eps)
    return latents, kv


def window_kv(numerics: Numerics, x: Tensor, weights: AttentionWeights, by: Phases, eps: float) -> Tensor:
    """Window KV [T, D] of rows [T, H]; the drafter makes its main entries with it alone."""
    kv = numerics.round(rms_norm(numerics.linear(x, weights.wkv), weights.kv_norm, eps))
    return numerics.round(rotate(kv, by))


def queries(numerics: Numerics, latents: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """Rotated queries [..., heads, D] of query latents [..., q rank]."""
    q = numerics.linear(latents, weights.wq_b).unflatten(-1, (weights.sink.shape[0], -1))
    return numerics.round(rotate(q, by.unsqueeze(-2)))


def attend(q: Tensor, keys: Keys, sink: Tensor) -> Tensor:
    """Attention output [B, n, heads, D] of queries [B, n, heads, D]; a row that sees nothing gives zero.

    The sink joins the denominator only. Scores of window and entries share one softmax, so a token may count twice.
    """
    rows, heads, width = q.shape[1:]
    scale = width**-0.5
    window = torch.bmm(q.flatten(1, 2), keys.window.transpose(1, 2)).unflatten(1, (rows, heads)) * scale
    window = window.masked_fill(~keys.window_mask.unsqueeze(2), -torch.inf)
    flat = keys.entries.flatten(0, 1)
    entries = torch.bmm(q.flatten(0, 1), flat.transpose(1, 2)).view(*q.shape[:3], -1) * scale
    entries = entries.masked_fill(~keys.entry_mask.unsqueeze(2), -torch.inf)
    both = torch.cat((window, entries), dim=-1)
    top = torch.maximum(both.amax(-1), sink) if both.shape[-1] else sink.expand(q.shape[:3])
    weights = torch.exp(both - top.unsqueeze(-1))
    total = weights.sum(-1) + torch.exp(sink - top)
    on_window, on_entries = weights.split((window.shape[-1], entries.shape[-1]), dim=-1)
    output = torch.bmm(on_window.flatten(1, 2), keys.window).view(q.shape)
    output += torch.bmm(on_entries.flatten(0, 1), flat).view(q.shape)
    return output / total.unsqueeze(-1)


def output(numerics: Numerics, attended: Tensor, weights: AttentionWeights, by: Phases) -> Tensor:
    """The layer's output [..., H] of attention [..., heads, D]: turned back at the query's position, then grouped."""
    turned = numerics.round(rotate(numerics.round(attended), by.inverse().unsqueeze(-2)))
    groups = weights.wo_a.shape[0]
    grouped = turned.flatten(-2).unflatten(-1, (groups, -1)).flatten(0, -3)
    low = torch.bmm(grouped.transpose(0, 1), weights.wo_a.transpose(1, 2).to(grouped.dtype)).transpose(0, 1)
    return numerics.linear(numerics.round(low.flatten(1)), weights.wo_b).view(*attended.shape[:-2], -1)
