"""What was made fast against the plain formula it stands for: tables, searches, pieces, joint softmax, tiny loops."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from shoal.engines.model import mhc, quant
from shoal.engines.model.attention import Keys, attend
from shoal.engines.model.norm import rms_norm
from shoal.engines.model.numerics import FEW_ROWS, PIECE_NUMBERS, PIECED_ROWS_MAX, Mode, Numerics, dot_products, product
from shoal.engines.model.rope import phases, rotate_rounded

BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("to", [torch.float32, torch.float64])
def test_tables_hold_the_value_of_every_byte(to: torch.dtype) -> None:
    want = BYTES.view(torch.float8_e4m3fn).to(torch.float32).to(to)
    assert torch.equal(quant.e4m3_to_float(BYTES, to).nan_to_num(nan=-1), want.nan_to_num(nan=-1))
    pairs = quant.e2m1_to_float(BYTES, to).view(256, 2)
    values = torch.tensor([*quant.FP4_VALUES, *(-v for v in quant.FP4_VALUES)], dtype=to)
    assert torch.equal(pairs[:, 0], values[(BYTES & 15).long()])
    assert torch.equal(pairs[:, 1], values[(BYTES >> 4).long()])


@pytest.mark.parametrize("decode", [quant.dequantise_fp8, quant.dequantise_mxfp4, quant.dequantise_fp4])
def test_both_widths_decode_alike(decode: quant.Dequantise) -> None:
    data = torch.randint(0, 256, (9, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data[data & 0x7F == 0x7F] = 0  # the NaN codes of e4m3
    scales = torch.tensor([[0, 1, 120, 127]], dtype=torch.uint8).expand(9, 4).contiguous()
    if decode is quant.dequantise_fp4:
        scales = torch.tensor([[1, 8, 56, 126]], dtype=torch.uint8).expand(9, 4).contiguous()
    assert torch.equal(decode(data, scales, torch.float64), decode(data, scales).to(torch.float64))


def test_fp4_codes_round_ties_to_the_even_code() -> None:
    x = torch.tensor(quant.FP4_MIDPOINTS)
    below, above = x.nextafter(torch.zeros(())), x.nextafter(torch.tensor(9.0))
    assert quant.float_to_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert quant.float_to_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert quant.float_to_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert quant.float_to_e2m1(-above).tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert quant.float_to_e2m1(torch.tensor([0.0, -0.0, 6.0, -6.0])).tolist() == [0, 8, 7, 15]


@pytest.mark.parametrize("rows", [1, 5])
def test_the_loop_on_a_cpu_is_the_iteration_of_a_device(rows: int) -> None:
    comb = torch.rand(rows, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1e-6
    plain = mhc._balance_on_device(comb.clone(), 20, 1e-6)
    torch.testing.assert_close(mhc.balance(comb.clone(), 20, 1e-6), plain, rtol=1e-13, atol=0)
    assert (plain.sum(1) - 1).abs().max() < 1e-5


def test_a_row_is_balanced_alike_in_any_batch_but_for_the_last_bits() -> None:
    comb = torch.rand(33, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    together = mhc.balance(comb.clone(), 20, 1e-6)
    alone = torch.cat([mhc.balance(row.unsqueeze(0), 20, 1e-6) for row in comb.clone()])
    torch.testing.assert_close(alone, together, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", [1, PIECED_ROWS_MAX, PIECED_ROWS_MAX + 1])
def test_pieces_of_a_weight_make_the_whole_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(700, 200, generator=generator).to(torch.bfloat16)
    assert weight.numel() > 2 * PIECE_NUMBERS
    x = torch.randn(rows, 200, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(product(x, weight), x @ weight.to(torch.float64).T, rtol=1e-12, atol=1e-12)


def test_threads_convert_weights_side_by_side() -> None:
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(300, 200, generator=generator).to(torch.bfloat16) for _ in range(4)]
    x = torch.randn(1, 200, generator=generator, dtype=torch.float64)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: product(x, weights[i % 4]), range(400)))
    for i, y in enumerate(found):
        torch.testing.assert_close(y, x @ weights[i % 4].to(torch.float64).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_keys_first_or_rows_first_give_the_same_products(rows: int) -> None:
    generator = torch.Generator().manual_seed(7)
    x, keys = (torch.randn(3, n, 20, generator=generator, dtype=torch.float64) for n in (rows, 50))
    torch.testing.assert_close(dot_products(x, keys), x @ keys.mT, rtol=1e-12, atol=1e-12)


def test_the_norm_is_that_of_torch_and_zero_stays_zero() -> None:
    generator = torch.Generator().manual_seed(8)
    x, weight = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (5, 1))
    for eps in (1e-20, 0.5):
        torch.testing.assert_close(
            rms_norm(x, weight[0], eps), torch.rms_norm(x, (24,), weight[0], eps), rtol=1e-13, atol=0
        )
    assert not rms_norm(torch.zeros_like(x), weight[0], 1e-20).any()


def test_own_entries_and_masked_shared_entries_attend_alike() -> None:
    generator = torch.Generator().manual_seed(5)
    q, pool = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 3, 2, 16), (1, 9, 16)))
    window = torch.randn(1, 4, 16, generator=generator, dtype=torch.float64)
    seen, sink = torch.rand(1, 3, 4, generator=generator) > 0.4, torch.tensor([0.3, -0.2], dtype=torch.float64)
    chosen = torch.tensor([[[0, 5], [8, 2], [3, -1]]])
    own = Keys(window, seen, pool[0][chosen.clamp_min(0)], chosen >= 0)
    mask = (torch.arange(9) == chosen.unsqueeze(-1)).any(2)
    shared = Keys(torch.cat((window, pool), dim=1), torch.cat((seen, mask), dim=-1))
    torch.testing.assert_close(attend(q, own, sink), attend(q, shared, sink), rtol=1e-12, atol=1e-12)
    blind = replace(shared, shared_mask=torch.zeros_like(shared.shared_mask))
    assert not attend(q, blind, sink).any(), "a row that sees nothing gives zero"


def test_turning_in_place_is_the_rotation_and_leaves_the_other_channels() -> None:
    numerics = Numerics.of(Mode.N1)
    x = numerics.round(torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    by = phases(torch.tensor([1.0, 0.5, 0.1, 0.01]), torch.arange(6) * 7, torch.float64)
    cos, sin = by.turn.real.unsqueeze(1), by.turn.imag.unsqueeze(1)
    real, imaginary = x[..., 12::2], x[..., 13::2]
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)
    want = torch.cat((x[..., :12], numerics.round(turned)), dim=-1)
    assert torch.equal(rotate_rounded(numerics, x.clone(), by.unsqueeze(1)), want)
    back = rotate_rounded(numerics, want.clone(), by.inverse().unsqueeze(1))
    torch.testing.assert_close(back, x, rtol=0.03, atol=0.03)
