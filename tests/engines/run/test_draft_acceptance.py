"""Whatever drafts and however often it is judged, the output has the model's own distribution."""

import itertools

import numpy as np
import pytest
import torch
from shoal.engines.config import CacheConfig, EngineConfig, Role
from shoal.engines.core.layout import CacheShape, block_layout, draft_pool_bytes, slot_layout
from shoal.engines.core.plan import StepKind
from shoal.engines.core.request import EngineRequest, SamplingParams, TokensEvent
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.model.drafter import DraftBlock, DraftChoice
from shoal.engines.run.acceptance import FRESH, judge
from shoal.engines.run.draft_pool import DraftPool
from shoal.engines.run.drafting import Drafting, Limits
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.runner import Runner
from shoal.engines.run.sampler import final_logprobs, sample
from torch import Tensor

VOCABULARY, PAD, BLOCK = 4, 3, 5
SHAPE = CacheShape(
    ratios=(0, 1), kv_sources=(1,), index_sources=(1,), n_prefill_layer=1, drafter_layers=0, window=4,
    backtracking=6, head_dim=32, index_dim=32, block_tokens=16,
)  # fmt: skip
CHAIN = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 1.5, 0.5], [-1.0, 2.0, 0.0, 0.3], [1.0, 0.0, 0.0, 1.0]])
GUESSES = {
    "close": CHAIN + torch.tensor([0.3, -0.2, 0.0, 0.4]),
    "equal": CHAIN,
    "far": CHAIN.flip(1) * 2,
    "broken": torch.full_like(CHAIN, torch.nan),
}


class Chain:
    """The next token depends on the last one alone; drafts come from another table."""

    lookback, vocabulary, eos_token_id = 2, VOCABULARY, VOCABULARY - 1

    def __init__(self, guesses: Tensor) -> None:
        self.guesses = guesses

    def forward(self, batch) -> Tensor:
        ends = torch.tensor(batch.q_lens).cumsum(0) - 1
        return batch.token_ids[ends] if batch.is_prefill else batch.token_ids

    def logits(self, hidden: Tensor) -> Tensor:
        return CHAIN[hidden]

    def draft(self, golden: Tensor, positions: Tensor, slots: Tensor, choice: DraftChoice) -> DraftBlock:
        tokens, logits = [golden], []
        for number in range(BLOCK):
            logits.append(self.guesses[tokens[-1]])
            tokens.append(choice(logits[-1], number))
        made, given = torch.stack(tokens[1:], 1), torch.stack(logits, 1)
        none = torch.zeros(len(golden), BLOCK)
        return DraftBlock(made, given, given, none, none, none, none)


def outputs(params: list[SamplingParams], guesses: Tensor, drafts: int, events: list | None = None) -> list[tuple]:
    """What an engine of the real scheduler and runner makes of the prompt (0, 1) under each of the parameters."""
    config = EngineConfig(
        Role.NORMAL, max_model_len=64, step_tokens_max=512, sequences_max=64,
        cache=CacheConfig(16, 300, 70), drafts=drafts,
    )  # fmt: skip
    memory = DeviceMemory(300, block_layout(SHAPE), 70, slot_layout(SHAPE))
    model, limits = Chain(guesses), Limits(eos_token_id=-1, max_model_len=64)
    drafting = Drafting(model, DraftPool(64, drafts, VOCABULARY, PAD), limits) if drafts else None
    runner = Runner(model, memory, ImageRows(hidden=1), drafting=drafting)
    scheduler = StepScheduler(config, -1, SchedulingRules(drafts=drafts, pad_token_id=PAD))
    for i, one in enumerate(params):
        scheduler.submit(EngineRequest(str(i), (0, 1), 2, one), now_us=0)
    found: list[list[int]] = [[] for _ in params]
    while scheduler.has_work:
        verdict = StepKind.PREFILL if scheduler.ballot(0).has_result else StepKind.DECODE
        plan = scheduler.plan(verdict, now_us=0)
        for event in scheduler.commit(plan, runner.run(plan), now_us=0):
            if isinstance(event, TokensEvent):
                found[int(event.request_id)] += event.token_ids
                if events is not None:
                    events.append(event)
    return [tuple(one) for one in found]


@pytest.mark.parametrize(
    ("guess", "drafts", "shape"),
    [
        ("close", 5, {}),
        ("close", 1, {"temperature": 0.7, "top_p": 0.9}),
        ("far", 5, {"top_k": 2}),
        ("far", 3, {"min_p": 0.2, "temperature": 1.4}),
        ("equal", 5, {"temperature": 1.3}),
        ("broken", 5, {}),
    ],
)
def test_sampled_outputs_have_the_models_distribution(guess: str, drafts: int, shape: dict) -> None:
    """All outputs of five tokens, grouped by the last three: 64 cells, of which filters leave fewer."""
    count = 1500
    params = [SamplingParams(seed=1000 + i, max_tokens=5, ignore_eos=True, **shape) for i in range(count)]
    said = outputs(params, GUESSES[guess], drafts)
    assert {len(one) for one in said} == {5}
    one = SamplingParams(**shape)
    step = final_logprobs(CHAIN.double(), [one] * VOCABULARY, torch.zeros(VOCABULARY, dtype=torch.bool)).exp().numpy()
    third = np.linalg.matrix_power(step, 3)[1]
    cells = list(itertools.product(range(VOCABULARY), repeat=3))
    want = np.array([third[a] * step[a, b] * step[b, c] for a, b, c in cells]) * count
    seen = np.array([sum(tokens[2:] == cell for tokens in said) for cell in cells])
    assert seen[want == 0].sum() == 0
    large = want >= 5
    rest = np.array([want[~large].sum()]), np.array([seen[~large].sum()])
    wanted, counted = np.concatenate((want[large], rest[0])), np.concatenate((seen[large], rest[1]))
    keep = wanted > 0
    statistic = float((((counted - wanted) ** 2)[keep] / wanted[keep]).sum())
    freedom = keep.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_drafts_that_are_right_are_accepted() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3
    said = outputs(params, CHAIN, 5)
    assert said == outputs(params, CHAIN, 0)
    assert said == outputs(params, GUESSES["far"], 3)


@pytest.mark.parametrize("guess", ["equal", "close", "far"])
def test_penalties_count_the_drafts_before_a_row(guess: str) -> None:
    asked = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, frequency_penalty=0.7, repetition_penalty=1.3, min_tokens=6
    )
    plain = outputs([asked], CHAIN, 0)
    assert plain != outputs([SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)], CHAIN, 0)
    assert outputs([asked], GUESSES[guess], 5) == plain


def test_judging_follows_the_ratio_of_the_two_distributions() -> None:
    """One draft judged under many seeds: accepted min(1, q / p) of the time, else drawn from what q has more of."""
    count, q, p = 20_000, torch.tensor([0.1, 0.5, 0.4, 0.0]), torch.tensor([0.4, 0.3, 0.3, 0.0])
    params = [SamplingParams(seed=i) for i in range(count)]
    rows, drafts = q.log().expand(count, -1), torch.zeros(count, dtype=torch.int64)
    judged = judge(rows, params, [7] * count, drafts, p.log().expand(count, -1))
    assert float(judged.accepted.double().mean()) == pytest.approx(0.25, abs=0.015)
    tokens = judged.tokens[~judged.accepted]
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    assert shares.tolist() == pytest.approx([0.0, 2 / 3, 1 / 3, 0.0], abs=0.015)
    sure = judge(rows, params, [7] * count, torch.ones(count, dtype=torch.int64), p.log().expand(count, -1))
    assert bool(sure.accepted.all()), "q is larger there"


def test_a_fresh_row_is_what_the_sampler_draws() -> None:
    params = [SamplingParams(seed=i, top_p=0.95) for i in range(200)]
    logits, none = CHAIN[[i % 4 for i in range(200)]], torch.full((200,), FRESH)
    judged = judge(logits, params, range(200), none, torch.full((200, VOCABULARY), -torch.inf))
    assert judged.tokens.tolist() == [s.token_id for s in sample(logits, params, range(200))]
    assert not bool(judged.accepted.any())


def test_every_accepted_token_has_its_logprobs() -> None:
    events: list[TokensEvent] = []
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
    outputs([params], CHAIN, 5, events)
    table = torch.log_softmax(CHAIN.double(), -1)
    last = 1
    assert max(len(event.token_ids) for event in events) > 1
    for event in events:
        for token_id, told in zip(event.token_ids, event.logprobs, strict=True):
            assert told.token == pytest.approx(float(table[last, token_id]))
            assert told.top[0][0] == token_id
            last = token_id


def test_nothing_is_output_behind_a_stop_token() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    free = outputs([params], CHAIN, 0)[0]
    stop = free[3]
    stopping = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    assert outputs([stopping], CHAIN, 5)[0] == free[: free.index(stop) + 1]


def test_slot_0_is_a_pad_for_certain_and_stays_so() -> None:
    pool = DraftPool(2, 3, 8, pad=7)
    tokens, logprobs = pool.read(0, 3)
    assert tokens.tolist() == [7, 7, 7]
    assert logprobs.exp().tolist() == [[0.0] * 7 + [1.0]] * 3
    with pytest.raises(AssertionError, match="never written"):
        pool.write(torch.tensor([0]), torch.zeros(1, 3), torch.zeros(1, 3, 8), torch.zeros(1, 3))
    assert draft_pool_bytes(2, 3, 8) == pool.logprobs.numel() * 4
