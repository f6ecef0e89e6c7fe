"""Rounding to the stored formats with straight-through gradients, in arithmetic that compiles into one kernel.

Values equal `engines.model.quant` (a test compares them); that module makes bytes with tables, this one stays in
floating point. The gradient of rounding is taken as one: weights and caches are trained as they will be read back.
"""

import torch
from shoal.engines.model.quant import E4M3_STEP_MIN, FP4_MAX, FP8_AMAX_MIN, FP8_MAX, UE8M0_FP4_AMAX_MIN
from torch import Tensor

EXPONENT_ROUND_UP = 0x7FFFFF
EXPONENT_MASK = 0x7F800000


def pow2_ceiling(x: Tensor) -> Tensor:
    """The smallest power of two >= x; x float32, positive and normal (exponent bits, never log2)."""
    return ((x.contiguous().view(torch.int32) + EXPONENT_ROUND_UP) & EXPONENT_MASK).view(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """Float32 within +-6 on the e2m1 grid {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code."""
    a = x.abs()
    half = (a > 0.25).float() + (a >= 0.75).float() + (a > 1.25).float() + (a >= 1.75).float()
    return (half * 0.5 + (a > 2.5).float() + (a >= 3.5).float() + 2 * (a > 5.0).float()) * torch.sign(x)


def fp8_rows(x: Tensor) -> Tensor:
    """FP8 e4m3 in groups of 32 with power-of-two scales: window KV and Engram rows, [..., n]."""
    grouped = x.detach().float().unflatten(-1, (-1, 32))
    scale = pow2_ceiling(grouped.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_MIN) / FP8_MAX)
    return _through(x, _e4m3(grouped / scale) * scale)


def fp4_rows(x: Tensor) -> Tensor:
    """FP4 e2m1 in groups of 16 with e4m3 scales: compressed main KV, [..., n]."""
    grouped = x.detach().float().unflatten(-1, (-1, 16))
    scale = _e4m3(grouped.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * E4M3_STEP_MIN) / FP4_MAX)
    return _through(x, round_e2m1((grouped / scale).clamp(-FP4_MAX, FP4_MAX)) * scale)


def mxfp4_rows(x: Tensor) -> Tensor:
    """FP4 e2m1 in groups of 32 with power-of-two scales: index keys and queries, routed experts, [..., n]."""
    grouped = x.detach().float().unflatten(-1, (-1, 32))
    scale = pow2_ceiling(grouped.abs().amax(-1, keepdim=True).clamp_min(UE8M0_FP4_AMAX_MIN) / FP4_MAX)
    return _through(x, round_e2m1((grouped / scale).clamp(-FP4_MAX, FP4_MAX)) * scale)


def fp8_blocks(x: Tensor) -> Tensor:
    """FP8 e4m3 in squares of 32 x 32 with power-of-two scales: dense weights [..., out, in], multiples of 32."""
    squares = x.detach().float().unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))
    scale = pow2_ceiling(squares.abs().amax(dim=(-3, -1), keepdim=True).clamp_min(FP8_AMAX_MIN) / FP8_MAX)
    return _through(x, (_e4m3(squares / scale) * scale).flatten(-4, -3))


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` (groups still apart) in the shape and type of x, with the gradient of x (the difference is zero)."""
    return rounded.flatten(-2).to(x.dtype) + (x - x.detach())
