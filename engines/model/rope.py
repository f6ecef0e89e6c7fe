"""Rotary positions: adjacent channel pairs of the last channels, with or without YaRN, forwards and back."""

import math
from dataclasses import dataclass

import torch
from shoal.engines.model.config import RopeScaling
from shoal.engines.model.numerics import Numerics
from shoal.engines.model.placement import Tile
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Phases:
    """Cosine and sine of each row's angles as complex numbers [..., pairs]; `inverse` turns back."""

    turn: Tensor

    def inverse(self) -> "Phases":
        """The conjugate phases."""
        return Phases(self.turn.conj_physical())

    def unsqueeze(self, dim: int) -> "Phases":
        """The same phases with a broadcast dimension (heads)."""
        return Phases(self.turn.unsqueeze(dim))

    def of_tile(self, tile: Tile) -> "Phases":
        """The phases [B, n, pairs] of a tile's rows."""
        return Phases(tile.take(self.turn))

    def __getitem__(self, rows: Tensor) -> "Phases":
        return Phases(self.turn[rows])


def frequencies(channels: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each pair, float32 [channels / 2].

    With `scaling`, YaRN interpolates frequencies at every length and scales no amplitude (model.py
    precompute_freqs_cis).
    """
    plain = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    if scaling is None:
        return plain.to(torch.float32)

    def turning_pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning_pair(scaling.beta_fast)), 0)
    high = min(math.ceil(turning_pair(scaling.beta_slow)), channels - 1)
    ramp = ((torch.arange(channels // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).to(torch.float32)


def phases(frequency: Tensor, positions: Tensor, wide: torch.dtype) -> Phases:
    """Phases of absolute positions, int64 [...]; the angle is a float32 product, as in the published code."""
    angle = (positions.unsqueeze(-1).to(torch.float32) * frequency).to(wide)
    return Phases(torch.complex(angle.cos(), angle.sin()))


def rotate_rounded(numerics: Numerics, x: Tensor, by: Phases) -> Tensor:
    """`x` [..., channels] with its last 2 x pairs channels turned and rounded, in place; the phases broadcast.

    `x` belongs to the caller alone and lies on the activation grid already, so that the channels that stand still
    need no rounding: they would round to themselves.
    """
    pairs = by.turn.shape[-1]
    # One complex product: (real + i imaginary) (cos + i sin).
    x.view(by.turn.dtype)[..., -pairs:].mul_(by.turn)
    numerics.round_(x[..., -2 * pairs :])
    return x
