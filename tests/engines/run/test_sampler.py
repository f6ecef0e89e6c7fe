"""The sampler draws exactly the stated distribution, whatever the batch, and the same on every engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from shoal.engines.core.request import SamplingParams
from shoal.engines.run.rng import below, mix64, random_words
from shoal.engines.run.sampler import sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draws(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    rows = logits.expand(count, -1)
    return [s.token_id for s in sample(rows, [params] * count, list(range(count)))]


def chi_square(observed: list[int], expected: np.ndarray) -> float:
    counts = np.bincount(observed, minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    want = expected[expected > 0] * len(observed)
    return float((((counts[expected > 0] - want) ** 2) / want).sum())


def expected(probabilities: torch.Tensor, keep: list[int]) -> np.ndarray:
    mask = torch.zeros_like(probabilities)
    mask[keep] = 1
    return (probabilities * mask / (probabilities * mask).sum()).double().numpy()


@pytest.mark.parametrize(
    ("params", "keep"),
    [
        (SamplingParams(seed=1), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(seed=2, temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(seed=3, top_k=3), [0, 1, 2]),
        (SamplingParams(seed=4, top_p=0.6), [0, 1]),
        (SamplingParams(seed=5, min_p=0.2), [0, 1, 2]),
        (SamplingParams(seed=6, top_k=4, top_p=0.8, min_p=0.3), [0, 1]),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams, keep: list[int]) -> None:
    """Fixed seeds; 20.5 is the 99.9 % quantile of chi-square with 5 degrees of freedom."""
    probabilities = torch.softmax(LOGITS.double() / params.temperature, -1)
    assert chi_square(draws(params, 20_000), expected(probabilities, keep)) < 20.5


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    flat = torch.zeros(4)
    assert set(draws(SamplingParams(top_p=0.5), 500, flat)) == {0, 1, 2}, "mass before token 2 is exactly p: kept"
    assert set(draws(SamplingParams(top_p=0.49), 500, flat)) == {0, 1}
    assert set(draws(SamplingParams(top_p=1e-9), 500, flat)) == {0}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 7.0, 1.0, 7.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [greedy], [3])[0].token_id == 1
    assert sample(logits, [replace(greedy, logprobs=1)], [3])[0].token_id == 1, "also when probabilities are asked for"


def test_a_row_is_the_same_in_any_batch_and_order() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 1024, generator=generator) * 4
    kinds = [
        SamplingParams(seed=9, temperature=0.8, top_p=0.9, logprobs=3),
        SamplingParams(seed=2**64 - 1, top_k=17, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(seed=123, min_p=0.05),
        SamplingParams(seed=5, logprobs=5),
    ]
    params = [kinds[i % len(kinds)] for i in range(40)]
    positions = [i * 37 for i in range(40)]
    together = sample(logits, params, positions)
    alone = tuple(sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(40))
    assert together == alone
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == tuple(together[i] for i in order)


def test_another_seed_or_position_is_another_stream() -> None:
    flat = torch.zeros(1, 1024)
    by_position = [sample(flat, [SamplingParams(seed=1)], [p])[0].token_id for p in range(50)]
    by_seed = [sample(flat, [SamplingParams(seed=s)], [7])[0].token_id for s in range(50)]
    assert len(set(by_position)) > 40
    assert len(set(by_seed)) > 40


def test_logprobs_are_of_the_final_distribution() -> None:
    params = SamplingParams(seed=3, temperature=0.5, top_k=2, logprobs=3)
    row = sample(LOGITS[None], [params], [0])[0]
    want = torch.log_softmax(LOGITS[:2].double() / 0.5, -1)
    assert row.logprobs is not None
    assert row.logprobs.token == pytest.approx(float(want[row.token_id]), abs=1e-12)
    assert [i for i, _ in row.logprobs.top] == [0, 1, 2]
    assert [v for _, v in row.logprobs.top] == pytest.approx([*want.tolist(), -9999.0])


def test_greedy_logprobs_are_untempered() -> None:
    row = sample(LOGITS[None], [SamplingParams(temperature=0.0, logprobs=1)], [0])[0]
    assert row.logprobs is not None
    assert row.logprobs.token == pytest.approx(float(torch.log_softmax(LOGITS.double(), -1)[0]))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_broken_row_does_not_touch_its_neighbours(temperature: float) -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS, torch.full_like(LOGITS, -torch.inf)])
    params = [SamplingParams(seed=1, temperature=temperature)] * 4
    rows = sample(logits, params, [0, 0, 0, 0])
    assert [r.is_valid for r in rows] == [True, False, True, False]
    assert rows[0] == rows[2] == sample(LOGITS[None], params[:1], [0])[0]


def test_masked_tokens_are_never_drawn() -> None:
    masked = LOGITS.clone()
    masked[0] = -torch.inf
    assert 0 not in draws(SamplingParams(seed=8), 2000, masked)


def test_generator_is_splitmix64() -> None:
    """Published first outputs of SplitMix64 from state 1234567: mix64(state + i * gamma)."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * gamma
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_words_are_pinned_so_that_a_stream_survives_an_upgrade() -> None:
    seeds, positions = np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 100, 10**6], dtype=np.uint64)
    words = [random_words(seeds, positions, c).tolist() for c in range(3)]
    assert len({w for row in words for w in row}) == 9
    assert words[0] == [12035550249420947055, 7150272306933734367, 14519021897404605101]


def test_below_is_exact() -> None:
    words = np.array([0, 2**64 - 1, 2**63, 0x123456789ABCDEF0], dtype=np.uint64)
    for bound in (1, 3, 1000, 1 << 31):
        got = below(words, np.full(4, bound, dtype=np.int64)).tolist()
        assert got == [(int(w) * bound) >> 64 for w in words]
    assert math.isclose(below(words, np.full(4, 1 << 31, dtype=np.int64))[2] / (1 << 31), 0.5)
