"""Engram's write into the residual streams: look up hashed rows, gate them per stream, add their value."""

from dataclasses import dataclass

import torch
from shoal.engines.model import quant
from shoal.engines.model.norm import inverse_rms
from shoal.engines.model.numerics import Linear, Numerics
from torch import Tensor

DOT_MIN = 1e-6
ROW_TILE = 256
"""Rows at a time: keys of every stream for a whole chunk would outweigh the streams themselves."""


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """One layer's table as stored (rows [n, width] e4m3, scales [n, width / 32]), projection and gate weights.

    wkv: [(m + 1) * H, columns * width], the keys of each stream then the value; query, key: [m, H] wide.
    """

    rows: Tensor
    scales: Tensor
    wkv: Linear
    query: Tensor
    key: Tensor


def write_engram(
    numerics: Numerics, streams: Tensor, rows: Tensor, image_mask: Tensor, weights: EngramWeights, eps: float
) -> Tensor:
    """Streams [T, m, H] with the memory of hashed rows (int64 [T, columns]) added; image positions get none.

    Source: published engram.py. The sign of the square root follows the dot product (copysign).
    """
    parts = [
        _write_tile(numerics, streams[i : i + ROW_TILE], rows[i : i + ROW_TILE], weights, eps)
        for i in range(0, len(rows), ROW_TILE)
    ]
    return torch.where(image_mask[:, None, None], streams, torch.cat(parts))


def look_up(weights: EngramWeights, rows: Tensor, wide: torch.dtype) -> Tensor:
    """The dequantised table rows of each token side by side, [T, columns * width]."""
    data = weights.rows.view(torch.uint8)[rows]
    return quant.dequantise_fp8(data, weights.scales[rows], wide).flatten(1)


def _write_tile(numerics: Numerics, streams: Tensor, rows: Tensor, weights: EngramWeights, eps: float) -> Tensor:
    count, hidden = streams.shape[1:]
    projected = numerics.linear(look_up(weights, rows, streams.dtype), weights.wkv)
    keys, value = projected[:, :-hidden].unflatten(-1, (count, hidden)), projected[:, None, -hidden:]
    scale = inverse_rms(streams, eps).mul_(inverse_rms(keys, eps)).squeeze(-1)
    dot = (streams * weights.query * weights.key * keys).sum(-1) * scale * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(DOT_MIN).sqrt(), dot))
    return numerics.round_(streams + gate.unsqueeze(-1) * value)
