"""Shifted manifold-constrained hyper-connections: how a sublayer reads and writes the residual streams.

A sublayer's input is collapsed with the `pre` of the sublayer before it; its own `post` and `comb` write the output.
Source: published model.py (hc_split_sinkhorn, hc_pre, hc_post).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from shoal.engines.model.norm import inverse_rms
from shoal.engines.model.numerics import product
from torch import Tensor

RMS_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Mixing parameters of one sublayer, all wide: fn [(2 + m) * m, m * H]; base and scale [(2 + m) * m].

    `scale` repeats the checkpoint's three factors, of pre, post and comb, for each of their outputs.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of one sublayer for T rows: pre [T, m] (for the next sublayer), post [T, m], comb [T, m in, m out]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def first_pre(rows: int, streams: int, like: Tensor) -> Tensor:
    """The `pre` before any sublayer, [rows, streams]: all weight on stream 0."""
    pre = torch.zeros(rows, streams, dtype=like.dtype, device=like.device)
    pre[:, 0] = 1
    return pre


def mix(streams: Tensor, weights: HyperWeights, iterations: int, eps: float) -> Mix:
    """Mixing weights of streams [T, m, H]; `comb` is made doubly stochastic by Sinkhorn's iteration."""
    count = streams.shape[1]
    flat = streams.flatten(1)
    mixes = product(flat, weights.fn).mul_(inverse_rms(flat, RMS_EPS))
    mixes = torch.addcmul(weights.base, mixes, weights.scale)
    gates = torch.sigmoid(mixes[:, : 2 * count])
    pre, post = gates[:, :count], gates[:, count:]
    comb = torch.softmax(mixes[:, 2 * count :].view(-1, count, count), dim=-1)
    return Mix(pre=pre + eps, post=2 * post, comb=balance(comb + eps, iterations, eps))


def balance(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn's iteration on matrices [T, m, m]: columns, then rows and columns in turn, divided by their sums.

    `comb` may be overwritten. On a CPU the many tiny steps run through numpy's own loops, whose calls cost a third of
    torch's; the rows lie last there, so that every step is one sweep. For a single matrix even those calls cost more
    than its numbers. Sums of four may come in another order in another batch, as in a product: that moves a weight by
    about 1e-16 of its size, and what the weights mix is rounded to the activation grid.
    """
    if not comb.is_cpu:
        return _balance_on_device(comb, iterations, eps)
    if comb.shape == (1, 4, 4):
        comb.numpy()[0] = _balance_one(comb[0].tolist(), iterations, eps)
        return comb
    values = comb.permute(1, 2, 0).contiguous().numpy()
    for step in range(2 * iterations - 1):
        values /= np.add.reduce(values, axis=step % 2, keepdims=True, initial=eps)
    return torch.from_numpy(values).permute(2, 0, 1)


def _balance_one(matrix: Sequence[Sequence[float]], iterations: int, eps: float) -> Sequence[Sequence[float]]:
    """The same for one matrix of four rows, in Python's own numbers."""
    (a, b, c, d), (e, f, g, h), (i, j, k, m), (p, q, r, s) = matrix
    for step in range(iterations):
        if step:
            w, x, y, z = a + b + c + d + eps, e + f + g + h + eps, i + j + k + m + eps, p + q + r + s + eps
            a, b, c, d = a / w, b / w, c / w, d / w
            e, f, g, h = e / x, f / x, g / x, h / x
            i, j, k, m = i / y, j / y, k / y, m / y
            p, q, r, s = p / z, q / z, r / z, s / z
        w, x, y, z = a + e + i + p + eps, b + f + j + q + eps, c + g + k + r + eps, d + h + m + s + eps
        a, b, c, d = a / w, b / x, c / y, d / z
        e, f, g, h = e / w, f / x, g / y, h / z
        i, j, k, m = i / w, j / x, k / y, m / z
        p, q, r, s = p / w, q / x, r / y, s / z
    return (a, b, c, d), (e, f, g, h), (i, j, k, m), (p, q, r, s)


def _balance_on_device(comb: Tensor, iterations: int, eps: float) -> Tensor:
    for step in range(2 * iterations - 1):
        comb = comb / (comb.sum(step % 2 + 1, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The sublayer input [T, H] that `pre` [T, m] reads from streams [T, m, H]."""
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def write(streams: Tensor, output: Tensor, by: Mix) -> Tensor:
    """New streams [T, m, H]: the output spread by `post`, the old streams mixed over comb's first index."""
    mixed = torch.bmm(by.comb.transpose(1, 2), streams)
    return mixed.baddbmm_(by.post.unsqueeze(2), output.unsqueeze(1))
