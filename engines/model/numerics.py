"""Where numbers are rounded: the modes N0, N1 and N2, and the one product that every linear layer uses.

Every step must give the same tokens whatever the chunk, batch and placement, although a matrix product of another shape
adds in another order. Therefore everything between two rounding points is computed in `wide`, float64 on CPU. Operands
of linear layers are exact in bfloat16, so that their products have 16 bits and a sum of 512 has room for 28 binary
orders of magnitude: it is exact, and has the same bits in any order (all of 31 million sums of the toy's layers and
logits, 400 tokens). What has float64 operands (softmax weights, stream mixing, norms) is moved by about 1e-16 of its
size while bfloat16 rounds at 4e-3: a flip needs a value within 1e-13 of a rounding edge. Measured on the toy
checkpoint, 260 tokens in one chunk against chunks of 64 and of 23 and 5: float64 leaves every byte of slot and blocks
and every logit equal; float32 changes 40 % of the slot's bytes and logits by 1.5, because a flip passes through the FP4
grids. Float64 takes 1.5 times as long. Activations are kept as `wide` tensors whose values lie on the grid of the mode.
"""

import threading
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from shoal.engines.model import quant
from torch import Tensor

PIECE_NUMBERS = 1 << 16
"""Numbers of a weight that are converted at once (0.5 MiB in float64)."""
PIECED_ROWS_MAX = 64
"""More rows than this take longer to multiply than to convert."""
FEW_ROWS = 16
"""Up to so many query rows are multiplied from the right."""


class Mode(StrEnum):
    """N0: float32, exact caches. N1: bfloat16 activations and quantised caches. N2: N1 with FP8 linear inputs."""

    N0 = "n0"
    N1 = "n1"
    N2 = "n2"


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] without bias. `is_quantised`: stored in FP8 or FP4, so N2 quantises its input."""

    weight: Tensor
    is_quantised: bool = False


class _Room(threading.local):
    """Where a thread converts pieces of weights: one place, written over and over, stays in the core's own cache.

    `of_shape(rows, columns)` is the place of a piece of that shape, and the same transposed.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):
            numbers = torch.empty(PIECE_NUMBERS, dtype=torch.float64)

        @cache
        def of_shape(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            piece = numbers[: rows * columns].view(rows, columns)
            return piece, piece.t()

        self.of_shape = of_shape


_room = _Room()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x . weight^T` in the type of x, the weight converted first; the one place where a device may differ.

    Weights that are exact in BF16 are kept so: a step of few rows takes as long as reading its weights from memory,
    and a fourth of the bytes is read faster and converted, a piece at a time inside the core's own cache, than
    float64. Pieces are whole rows, so every output is still one sum.
    """
    if weight.dtype is x.dtype:
        return torch.nn.functional.linear(x, weight)
    outputs, columns = weight.shape
    if x.numel() > columns * PIECED_ROWS_MAX or columns > PIECE_NUMBERS or x.dtype is not torch.float64 or not x.is_cpu:
        return torch.nn.functional.linear(x, weight.to(x.dtype))
    if x.dim() != 2:
        return product(x.reshape(-1, columns), weight).view(*x.shape[:-1], outputs)
    count = PIECE_NUMBERS // columns
    if outputs <= count:
        return _piece(x, weight)
    return torch.cat([_piece(x, weight[first : first + count]) for first in range(0, outputs, count)], dim=-1)


def _piece(x: Tensor, weight: Tensor) -> Tensor:
    converted, transposed = _room.of_shape(*weight.shape)
    converted.copy_(weight)
    return torch.mm(x, transposed)


def dot_products(rows: Tensor, keys: Tensor) -> Tensor:
    """Products [B, n, K] of rows [B, n, D] with keys [B, K, D].

    With few rows the keys go first: read row by row as they lie, they take half as long.
    """
    if rows.shape[1] <= FEW_ROWS:
        return torch.bmm(keys, rows.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(rows, keys.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class Numerics:
    """The rounding points of one mode; `wide` is the type that all arithmetic happens in."""

    activation: torch.dtype
    quantise_cache: bool
    quantise_inputs: bool
    wide: torch.dtype = torch.float64

    @classmethod
    def of(cls, mode: Mode) -> "Numerics":
        """The rounding of a named mode."""
        if mode is Mode.N0:
            return cls(torch.float32, quantise_cache=False, quantise_inputs=False)
        return cls(torch.bfloat16, quantise_cache=True, quantise_inputs=mode is Mode.N2)

    @property
    def is_exact(self) -> bool:
        """Whether activations keep float32 precision."""
        return self.activation is torch.float32

    def round(self, x: Tensor) -> Tensor:
        """`x` on the activation grid, as a wide tensor."""
        return x.to(self.activation).to(self.wide)

    def round_(self, x: Tensor) -> Tensor:
        """`round` in place, for a wide tensor that nobody else holds: the same bytes without another large buffer."""
        return x.copy_(x.to(self.activation))

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """The rounded output of a linear layer; [..., in] to [..., out]."""
        return self.round_(self.linear_unrounded(x, layer))

    def linear_unrounded(self, x: Tensor, layer: Linear) -> Tensor:
        """The output of a linear layer before any rounding."""
        if layer.is_quantised and self.quantise_inputs:
            x = quant.dequantise_fp8(*quant.quantise_fp8(x), self.wide)
        return product(x, layer.weight)

    def window_row(self, x: Tensor) -> Tensor:
        """Window KV as its FP8 row reads back."""
        return self._through(x, quant.quantise_fp8, quant.dequantise_fp8)

    def main_row(self, x: Tensor) -> Tensor:
        """Compressed KV as its FP4 row reads back."""
        return self._through(x, quant.quantise_fp4, quant.dequantise_fp4)

    def index_row(self, x: Tensor) -> Tensor:
        """Index keys, and index queries, as their MXFP4 rows read back."""
        return self._through(x, quant.quantise_mxfp4, quant.dequantise_mxfp4)

    def _through(self, x: Tensor, quantise: quant.Quantise, dequantise: quant.Dequantise) -> Tensor:
        return dequantise(*quantise(x), self.wide) if self.quantise_cache else x
