"""Rotary positions: adjacent channel pairs of the last channels, with or without YaRN, forwards and back."""

import math
from dataclasses import dataclass

import torch
from shoal.engines.model.config import RopeScaling
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Phases:
    """Cosine and sine of each row's angles, wide [..., pairs]; `inverse` turns back."""

    cos: Tensor
    sin: Tensor

    def inverse(self) -> "Phases":
        """The conjugate phases."""
        return Phases(self.cos, -self.sin)

    def unsqueeze(self, dim: int) -> "Phases":
        """The same phases with a broadcast dimension (heads)."""
        return Phases(self.cos.unsqueeze(dim), self.sin.unsqueeze(dim))

    def __getitem__(self, rows: Tensor) -> "Phases":
        return Phases(self.cos[rows], self.sin[rows])


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
    return Phases(angle.cos(), angle.sin())


def rotate(x: Tensor, by: Phases) -> Tensor:
    """`x` [..., channels] with its last 2 x pairs channels turned; the phases broadcast over the leading dims."""
    pairs = by.cos.shape[-1]
    still, turning = x[..., : -2 * pairs], x[..., -2 * pairs :].unflatten(-1, (pairs, 2))
    real, imaginary = turning[..., 0], turning[..., 1]
    turned = torch.stack((real * by.cos - imaginary * by.sin, real * by.sin + imaginary * by.cos), dim=-1)
    return torch.cat((still, turned.flatten(-2)), dim=-1)
