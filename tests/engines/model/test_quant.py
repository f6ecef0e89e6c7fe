"""Number formats: recorded bytes, round trips and the weights' block scales."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.model import quant
from shoal.engines.model.check.parts import FORMATS, check_quantisers
from shoal.engines.model.check.report import Reference

VECTORS = Path(__file__).resolve().parents[2] / "data" / "oracle" / "quant_vectors.npz"


def test_recorded_bytes_are_equal() -> None:
    with np.load(VECTORS) as arrays:
        reference = Reference("quant_vectors.npz", dict(arrays))
    check_quantisers(reference)
    assert [f.line() for f in reference.findings if not f.passed] == []
    assert reference.used == set(reference.arrays)


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(-12, 12))
def test_stored_values_are_exact_in_bfloat16(name: str, seed: int, scale: float) -> None:
    quantise, dequantise = FORMATS[name]
    values = dequantise(*quantise(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)) * 2.0**scale))
    assert torch.equal(values.to(torch.bfloat16).to(torch.float32), values)


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0, 8))
def test_stored_values_store_again_alike(name: str, seed: int, scale: float) -> None:
    quantise, dequantise = FORMATS[name]
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)) * 2.0**scale
    values = dequantise(*quantise(x))
    # Tiny e4m3 scales are subnormal and too coarse for this; nothing in the model quantises twice.
    assert torch.equal(dequantise(*quantise(values)), values)


def test_every_exponent_byte_is_a_power_of_two() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(quant.ue8m0_to_float(exponents), torch.exp2(torch.arange(255).double() - 127).float())
    assert quant.ue8m0_to_float(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_powers_of_two_are_their_own_ceiling() -> None:
    for exponent in (-120, -1, 0, 5, 100):
        power = torch.tensor([2.0**exponent])
        above = torch.nextafter(power, torch.tensor([torch.inf]))
        assert quant.power_of_two_ceiling(power).item() == exponent + 127
        assert quant.power_of_two_ceiling(above).item() == exponent + 128
        exponents, values = quant.power_of_two_scales(torch.cat((power, above)))
        assert exponents.tolist() == [exponent + 127, exponent + 128]
        assert values.tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


def test_block_scales_cover_their_squares_also_at_a_ragged_edge() -> None:
    weight = torch.ones(40, 33).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [129, 126]], dtype=torch.uint8)
    values = quant.dequantise_fp8_blocks(weight, scales)
    assert values[0, 0] == 1
    assert values[31, 32] == 2
    assert values[32, 31] == 4
    assert values[39, 32] == 0.5
