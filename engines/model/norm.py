"""Root-mean-square normalisation; there is no other norm in the trunk."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in the type of x and not rounded."""
    return torch.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
