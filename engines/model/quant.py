"""The four number formats of weights and caches, to the byte: FP8 and FP4 rows, and the weights in blocks.

Quantisers take float32 `[..., n]` and give `(data, scales)` bytes; dequantisers give float32, or float64 with the same
values: a product of value and scale is exact in both (its significand has at most 8 bits). A byte is decoded by a
table of all 256 values, which on a CPU is five times as fast as conversion. Formulas and byte order: published
model.py (act_quant, fp4_act_quant) and DeepInfer's cache engine. A power-of-two scale comes from exponent bits, never
from log2; values are divided by the scale, then clamped, then rounded to nearest, ties to even.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_MIN = 1e-4
E4M3_STEP_MIN = 2.0**-9  # smallest positive e4m3 value
UE8M0_FP4_AMAX_MIN = FP4_MAX * 2.0**-126
FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Quantise(Protocol):
    """Values to (data, scales) bytes, in the format's own group."""

    def __call__(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Encode `[..., n]`."""


class Dequantise(Protocol):
    """(data, scales) bytes to values."""

    def __call__(self, data: Tensor, scales: Tensor, to: torch.dtype = torch.float32, /) -> Tensor:
        """Decode to `[..., n]` of type `to`, float32 or float64."""


def power_of_two_ceiling(x: Tensor) -> Tensor:
    """Biased exponent byte (uint8) of the smallest power of two >= x; x is float32, positive and normal."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).to(torch.uint8)


def power_of_two_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """`power_of_two_ceiling` and the values of its bytes, float32."""
    exponents = (x.view(torch.int32) + 0x7FFFFF) >> 23
    return exponents.to(torch.uint8), (exponents << 23).view(torch.float32)


def ue8m0_to_float(scales: Tensor, to: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127) for a uint8 tensor; byte 0 is the float32 subnormal 2^-127, byte 255 is NaN."""
    return _look_up(ue8m0_table(to, scales.device), scales)


def e4m3_to_float(data: Tensor, to: torch.dtype = torch.float32) -> Tensor:
    """The values of FP8 e4m3fn bytes (uint8)."""
    return _look_up(e4m3_table(to, data.device), data)


@cache
@torch.inference_mode(False)
def ue8m0_table(to: torch.dtype, device: torch.device) -> Tensor:
    """The value of every UE8M0 byte, [256]."""
    exponent = torch.arange(256, dtype=torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32)).to(device, to)


@cache
@torch.inference_mode(False)
def e4m3_table(to: torch.dtype, device: torch.device) -> Tensor:
    """The value of every e4m3fn byte, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).to(device, to)


@cache
@torch.inference_mode(False)
def e2m1_table(to: torch.dtype, device: torch.device) -> Tensor:
    """The two values of every byte of two e2m1 codes, [256], the low nibble's as real part: one item a byte to copy."""
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], dtype=to)
    byte = torch.arange(256)
    return torch.complex(values[byte & 15], values[byte >> 4]).to(device)


def float_to_e4m3(x: Tensor) -> Tensor:
    """Float32 within +-448 as e4m3fn bytes (uint8), round to nearest, ties to even."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def float_to_e2m1(x: Tensor) -> Tensor:
    """Float32 within +-6 as 4-bit codes (uint8, sign in bit 3), ties to the even code; -0 keeps its sign."""
    code = torch.bucketize(x.abs(), e2m1_edges(x.device), out_int32=True)
    return (code | (torch.signbit(x) << 3)).to(torch.uint8)


@cache
@torch.inference_mode(False)
def e2m1_edges(device: torch.device) -> Tensor:
    """The largest float32 magnitudes of the codes 0 to 6, [7]: a tie between two codes goes to the even one."""
    midpoints = torch.tensor(FP4_MIDPOINTS, dtype=torch.float32)
    is_odd = torch.arange(len(FP4_MIDPOINTS)) % 2 == 1
    return torch.where(is_odd, midpoints.nextafter(torch.zeros(())), midpoints).to(device)


def e2m1_to_float(data: Tensor, to: torch.dtype = torch.float32) -> Tensor:
    """Bytes `[..., n/2]` of two 4-bit codes each as values `[..., n]`."""
    pairs = e2m1_table(to, data.device).index_select(0, data.to(torch.int32).flatten())
    return torch.view_as_real(pairs).view(*data.shape[:-1], 2 * data.shape[-1])


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes `[..., n]` as bytes `[..., n/2]`; the low nibble is the even channel."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def quantise_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 in groups with UE8M0 scales: `[..., n]` to bytes `[..., n]` and `[..., n/group]`."""
    grouped = _grouped(x, group)
    scales, divisors = power_of_two_scales(grouped.abs().amax(-1).clamp_min_(FP8_AMAX_MIN).div_(FP8_MAX))
    scaled = grouped / divisors.unsqueeze(-1)
    return float_to_e4m3(scaled.clamp_(-FP8_MAX, FP8_MAX)).flatten(-2), scales


def dequantise_fp8(data: Tensor, scales: Tensor, to: torch.dtype = torch.float32, /) -> Tensor:
    """Values `[..., n]` of quantise_fp8's bytes; the group is n / number of scales."""
    return _scaled(e4m3_to_float(data, to), ue8m0_to_float(scales, to))


def quantise_fp4(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """FP4 e2m1 in groups with e4m3 scales: `[..., n]` to bytes `[..., n/2]` and `[..., n/group]`."""
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1).clamp_min_(FP4_MAX * E4M3_STEP_MIN)
    scales = float_to_e4m3(amax.div_(FP4_MAX).clamp_max_(FP8_MAX))
    scaled = grouped / e4m3_to_float(scales).unsqueeze(-1)
    return pack_nibbles(float_to_e2m1(scaled.clamp_(-FP4_MAX, FP4_MAX)).flatten(-2)), scales


def dequantise_fp4(data: Tensor, scales: Tensor, to: torch.dtype = torch.float32, /) -> Tensor:
    """Values `[..., n]` of quantise_fp4's bytes."""
    return _scaled(e2m1_to_float(data, to), e4m3_to_float(scales, to))


def quantise_mxfp4(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """FP4 e2m1 in groups with UE8M0 scales: `[..., n]` to bytes `[..., n/2]` and `[..., n/group]`."""
    grouped = _grouped(x, group)
    scales, divisors = power_of_two_scales(grouped.abs().amax(-1).clamp_min_(UE8M0_FP4_AMAX_MIN).div_(FP4_MAX))
    scaled = grouped / divisors.unsqueeze(-1)
    return pack_nibbles(float_to_e2m1(scaled.clamp_(-FP4_MAX, FP4_MAX)).flatten(-2)), scales


def dequantise_mxfp4(data: Tensor, scales: Tensor, to: torch.dtype = torch.float32, /) -> Tensor:
    """Values `[..., n]` of quantise_mxfp4's bytes; also the weights of routed experts."""
    return _scaled(e2m1_to_float(data, to), ue8m0_to_float(scales, to))


def dequantise_fp8_blocks(weight: Tensor, scales: Tensor, block: int = 32) -> Tensor:
    """Float32 `[out, in]` of an FP8 weight with one UE8M0 scale for each `block` x `block` square."""
    values = e4m3_to_float(weight.view(torch.uint8))
    factor = ue8m0_to_float(scales.view(torch.uint8))
    rows, columns = values.shape
    factor = factor.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return values * factor


def join_block_rows(data: Tensor, scales: Tensor) -> Tensor:
    """Index keys of one block as stored: all data rows, then all scale rows; one flat uint8 tensor."""
    return torch.cat((data.flatten(), scales.flatten()))


def join_rows(data: Tensor, scales: Tensor) -> Tensor:
    """Rows as stored in windows and in main sections: the data of a row, then its scales; uint8 `[..., bytes]`."""
    return torch.cat((data, scales), dim=-1)


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.to(torch.float32).reshape(*x.shape[:-1], -1, group)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    # Fresh from a table, so nobody else sees it change.
    values.view(*scales.shape, values.shape[-1] // scales.shape[-1]).mul_(scales.unsqueeze(-1))
    return values


def _look_up(table: Tensor, data: Tensor) -> Tensor:
    return table.index_select(0, data.to(torch.int32).flatten()).view(data.shape)
