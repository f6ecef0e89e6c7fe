"""Training rounds to the very values that caches and weights hold when they are served."""

from collections.abc import Callable

import pytest
import torch
from shoal.engines.model import quant
from shoal.engines.model.save import quantise_fp8_blocks
from shoal.engines.toy.training import fake_quant
from torch import Tensor


def served_blocks(x: Tensor) -> Tensor:
    return torch.stack([quant.dequantise_fp8_blocks(*quantise_fp8_blocks(m), 32) for m in x])


SERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_rows": lambda x: quant.dequantise_fp8(*quant.quantise_fp8(x)),
    "fp4_rows": lambda x: quant.dequantise_fp4(*quant.quantise_fp4(x)),
    "mxfp4_rows": lambda x: quant.dequantise_mxfp4(*quant.quantise_mxfp4(x)),
    "fp8_blocks": served_blocks,
}


def values() -> Tensor:
    """Rows of very different size, with zeros, ties of both FP4 scales and one row of nothing."""
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
    x = x * torch.logspace(-6, 3, 64).unsqueeze(1)
    x[:, :, ::9] = 0.25 * x.abs().amax(-1, keepdim=True)
    x[:, 5] = 0
    return x


@pytest.mark.parametrize("name", SERVED)
def test_values_are_those_of_the_stored_format(name: str) -> None:
    x = values()
    assert torch.equal(getattr(fake_quant, name)(x), SERVED[name](x))


@pytest.mark.parametrize("name", SERVED)
def test_the_gradient_passes_straight_through(name: str) -> None:
    x = values().requires_grad_()
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    (getattr(fake_quant, name)(x) * slope).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, slope)
