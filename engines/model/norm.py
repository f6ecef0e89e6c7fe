"""Root-mean-square normalisation; there is no other norm in the trunk."""

from functools import cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in the type of x and not rounded."""
    return (x * inverse_rms(x, eps)).mul_(weight.to(x.dtype))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean of squares + eps)` over the last dimension, which is kept with size 1.

    The length of a vector is one sweep; squares and their mean one after the other take four times as long.
    """
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps, x.dtype, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()


@cache
@torch.inference_mode(False)
def _number(value: float, to: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=to, device=device)
