"""Penalties, biases and least lengths: each formula against one written out by hand, and rows that ask for nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.core.sequence import Sequence
from shoal.engines.run.penalties import Penalties

VOCAB, EOS = 12, 1


def request(sampling: SamplingParams, prompt: tuple[int, ...] = (2, 3, 3)) -> EngineRequest:
    return EngineRequest("r", prompt, len(prompt), sampling)


def nothing(row: int) -> tuple[int, ...]:
    return ()


def naive(logits: list[float], asked: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
    found = list(logits)
    for token, bias in asked.logit_bias:
        found[token] += bias
    if len(output) < asked.min_tokens:
        for token in (EOS, *asked.stop_token_ids):
            found[token] = -float("inf")
    for token in range(VOCAB):
        if token in prompt + output:
            by = asked.repetition_penalty
            found[token] = found[token] / by if found[token] > 0 else found[token] * by
        count = output.count(token)
        found[token] -= asked.frequency_penalty * count + (asked.presence_penalty if count else 0.0)
    return found


token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, max_size=8).map(tuple)
asked_for = st.builds(
    SamplingParams,
    stop_token_ids=st.lists(token, max_size=2).map(tuple),
    min_tokens=st.integers(0, 6),
    logit_bias=st.lists(st.tuples(token, st.floats(-100, 100)), max_size=3, unique_by=lambda one: one[0]).map(tuple),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
)


@given(asked_for, tokens.filter(bool), tokens, st.lists(st.floats(-30, 30), min_size=VOCAB, max_size=VOCAB))
def test_equals_the_formulas_written_out(
    asked: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], logits: list[float]
):
    given_logits = torch.tensor([logits], dtype=torch.float64)
    found = Penalties(EOS).apply(given_logits, [request(asked, prompt)], lambda _: output)[0].tolist()
    assert found == pytest.approx(naive(logits, asked, prompt, output), rel=1e-9, abs=1e-9)
    assert given_logits.tolist() == [logits], "the model's logits are not changed"


def test_rows_that_ask_for_nothing_are_not_even_copied():
    logits = torch.randn(2, VOCAB)
    assert Penalties(EOS).apply(logits, [request(SamplingParams())] * 2, nothing) is logits


def test_other_rows_of_a_batch_stay_as_they_are():
    logits, plain = torch.randn(3, VOCAB), request(SamplingParams())
    found = Penalties(EOS).apply(logits, [plain, request(SamplingParams(min_tokens=3)), plain], nothing)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert found[1, EOS] == -torch.inf


def test_a_rerouted_request_counts_what_was_put_out_elsewhere():
    asked = SamplingParams(repetition_penalty=2.0)
    here = Sequence(EngineRequest("r", (2, 3, 7, 7), 2, asked))  # two of four tokens are output of another engine
    here.push(8)
    assert here.output_ids == (7, 7, 8)
    found = Penalties(EOS).apply(torch.ones(1, VOCAB), [here.request], lambda _: here.output_ids)[0]
    assert [i for i in range(VOCAB) if found[i] == 0.5] == [2, 3, 7, 8]


def test_a_name_used_again_does_not_meet_the_old_prompt():
    penalties, asked = Penalties(EOS), SamplingParams(repetition_penalty=2.0)
    logits = torch.ones(1, VOCAB)
    assert penalties.apply(logits, [request(asked, (4,))], nothing)[0, 4] == 0.5
    found = penalties.apply(logits, [request(asked, (5,))], nothing)[0]
    assert (found[4], found[5]) == (1.0, 0.5)
