"""Root-mean-square normalisation; there is no other norm in the trunk."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in the type of x and not rounded."""
    return (x * inverse_rms(x, eps)).mul_(weight.to(x.dtype))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean of squares + eps)` over the last dimension, which is kept with size 1.

    The length of a vector is one sweep; squares, their mean and the root one after the other take four times as long.
    """
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
