"""Attention over window and compressed entries for training: dense products under masks, one softmax, MQA shapes.

One latent per token is key and value of all heads, so heads are rows of one large product. The window is computed in
blocks of its own size (each sees itself and the block before it), entries in tiles of queries that skip what no query
of the tile can see. Probabilities are kept for the backward pass, scores are not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from shoal.engines.toy.training.fused import fused
from torch import Tensor

QUERY_TILE = 512


@dataclass(frozen=True, slots=True)
class Masks:
    """What the rows of one layer kind see: window bool [B, T, 2 W] in blocks, entries bool [B, T, E] or None."""

    window: Tensor
    entries: Tensor | None


@fused
def _probabilities(
    window: Tensor, entries: Tensor, seen: Tensor, chosen: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, ...]:
    on_window = (window.float() * scale).masked_fill(~seen.unsqueeze(2), -torch.inf)
    on_entries = (entries.float() * scale).masked_fill(~chosen.unsqueeze(2), -torch.inf)
    top = torch.maximum(torch.maximum(on_window.amax(-1), on_entries.amax(-1)), sink)
    on_window, on_entries = torch.exp(on_window - top.unsqueeze(-1)), torch.exp(on_entries - top.unsqueeze(-1))
    total = (on_window.sum(-1) + on_entries.sum(-1) + torch.exp(sink - top)).unsqueeze(-1)
    return (on_window / total).bfloat16(), (on_entries / total).bfloat16()


@fused
def _gradients(
    window: Tensor, entries: Tensor, by_window: Tensor, by_entries: Tensor, scale: float
) -> tuple[Tensor, ...]:
    w, e, dw, de = window.float(), entries.float(), by_window.float(), by_entries.float()
    centre = (w * dw).sum(-1, keepdim=True) + (e * de).sum(-1, keepdim=True)
    of_sink = -((1 - w.sum(-1) - e.sum(-1)) * centre.squeeze(-1))
    return (w * (dw - centre) * scale).bfloat16(), (e * (de - centre) * scale).bfloat16(), of_sink


class _Softmax(torch.autograd.Function):
    """Probabilities of window and entries under one softmax with a sink; only they are kept."""

    @staticmethod
    def forward(
        ctx: Any, window: Tensor, entries: Tensor, masks: tuple[Tensor, Tensor], sink: Tensor, scale: float
    ) -> Any:
        both = _probabilities(window, entries, *masks, sink, scale)
        ctx.save_for_backward(*both)
        ctx.scale = scale
        return both

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        window, entries = ctx.saved_tensors
        by_window, by_entries, of_sink = _gradients(window, entries, *(g.contiguous() for g in grads), ctx.scale)
        return by_window, by_entries, None, of_sink.sum((0, 1)), None


def blocks_with_previous(x: Tensor, window: int) -> Tensor:
    """Blocks of `window` rows of x [B, T, …] with the block before each: [B, T / window, 2 window, …]."""
    own = x.unflatten(1, (-1, window))
    before = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), dim=1)
    return torch.cat((before, own), dim=2)


def attend(q: Tensor, kv: Tensor, entries: Tensor | None, masks: Masks, sink: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attention [B, T, heads, D] of queries of the same shape, and each entry's probability summed over heads [B, T, E].

    kv [B, T, D]: window rows; entries [B, E, D]: compressed rows in order of position (None: window only). The
    second result has no gradient.
    """
    batch, rows, heads, width = q.shape
    window = masks.window.shape[-1] // 2
    keys = blocks_with_previous(kv, window).flatten(0, 1)
    outputs, masses = [], []
    for start in range(0, rows, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, rows))
        count = tile.stop - tile.start
        own = q[:, tile].reshape(-1, window * heads, width)
        first, last = start // window, tile.stop // window
        near = keys.unflatten(0, (batch, -1))[:, first:last].flatten(0, 1)
        on_window = torch.bmm(own, near.transpose(1, 2)).view(batch, count, heads, -1)
        seen = masks.window[:, tile]
        visible = 0 if entries is None else -(-entries.shape[1] * tile.stop // rows)
        far = kv.new_zeros(batch, 1, width) if entries is None else entries[:, :visible]
        by_row = q[:, tile].reshape(batch, count * heads, width)
        on_far = torch.bmm(by_row, far.transpose(1, 2)).view(batch, count, heads, -1)
        chosen = masks.entries[:, tile, :visible] if masks.entries is not None else seen.new_zeros(batch, count, 1)
        p_window, p_far = _Softmax.apply(on_window, on_far, (seen, chosen), sink, width**-0.5)
        out = torch.bmm(p_window.view(-1, window * heads, 2 * window), near).view(batch, count, heads, width)
        outputs.append(out + torch.bmm(p_far.view(batch, count * heads, -1), far).view(out.shape))
        if entries is not None:
            mass = p_far.detach().float().sum(2)
            masses.append(torch.nn.functional.pad(mass, (0, entries.shape[1] - visible)))
    return torch.cat(outputs, 1), torch.cat(masses, 1) if masses else None
