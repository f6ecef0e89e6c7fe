"""One plan on a model: copies before the forward, the right rows sampled, a broken row fails alone."""

import pytest
import torch
from shoal.engines.core.layout import CacheShape, block_layout, slot_layout
from shoal.engines.core.plan import Plan, PlanItem, StepKind
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.core.sequence import Sequence
from shoal.engines.model.batch import Batch
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.runner import Runner

SHAPE = CacheShape(
    ratios=(0, 1), kv_sources=(1,), index_sources=(1,), n_prefill_layer=1, drafter_layers=0, window=4,
    backtracking=2, head_dim=32, index_dim=32, block_tokens=4,
)  # fmt: skip
VOCABULARY = 50


class EchoModel:
    """The token after id t is t + 1; id 13 breaks its row. Notes the first byte of slot 1 when it runs."""

    lookback = 2
    vocabulary = VOCABULARY
    eos_token_id = 1

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.seen: list[int] = []
        self.joined = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.seen.append(int(self.memory.slots[1, 0]))
        ends = torch.tensor(batch.q_lens).cumsum(0) - 1
        return (batch.token_ids[ends] if batch.is_prefill else batch.token_ids).double().unsqueeze(1)

    def join(self) -> None:
        self.joined += 1

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = hidden.squeeze(1).long()
        logits = torch.nn.functional.one_hot(ids + 1, VOCABULARY).float()
        return torch.where(ids.unsqueeze(1) == 13, torch.nan, logits)


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(8, block_layout(SHAPE), 8, slot_layout(SHAPE))


@pytest.fixture
def runner(memory: DeviceMemory) -> Runner:
    return Runner(EchoModel(memory), memory, ImageRows(hidden=1))


def item(name: str, ids: tuple[int, ...], slot: int, start: int, rows: int, completes: bool = True) -> PlanItem:
    params = SamplingParams(temperature=0.0, logprobs=1 if name == "wordy" else None)
    sequence = Sequence(EngineRequest(name, ids, len(ids), params))
    sequence.block_table, sequence.slot = [slot], slot
    return PlanItem(sequence, start, rows, completes)


def test_prefill_samples_the_last_row_of_prompts_that_are_complete(runner: Runner) -> None:
    items = (item("a", (3, 4, 5), 1, 0, 3), item("cut", (6, 7, 8), 2, 0, 2, completes=False), item("b", (9,), 3, 0, 1))
    result = runner.run(Plan(1, StepKind.PREFILL, items))
    assert list(result.sampled) == [6, 0, 10]
    assert result.failed == ()


def test_decode_samples_the_last_of_several_rows(runner: Runner) -> None:
    items = (item("a", (3, 4, 5, 6), 1, 1, 3), item("wordy", (20, 30), 2, 1, 1))
    result = runner.run(Plan(1, StepKind.DECODE, items))
    assert list(result.sampled) == [7, 31]
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.logprobs[1].top[0][0] == 31


def test_a_row_that_is_not_finite_fails_its_request_alone(runner: Runner) -> None:
    result = runner.run(Plan(1, StepKind.PREFILL, (item("a", (3,), 1, 0, 1), item("bad", (12, 13), 2, 0, 2))))
    assert list(result.sampled) == [4, 0]
    assert result.failed == (("bad", "the model gave no finite logits at position 2"),)


def test_copies_come_before_the_forward(memory: DeviceMemory) -> None:
    model = EchoModel(memory)
    runner = Runner(model, memory, ImageRows(hidden=1))
    memory.slots[2], memory.slots[3] = 7, 9
    plan = Plan(1, StepKind.PREFILL, (item("a", (3,), 1, 0, 1),), clone_slots=((2, 1),), zero_slots=(3,))
    runner.run(plan)
    assert model.seen == [7]
    assert not memory.slots[3].any()


def test_an_empty_plan_joins_the_other_ranks_with_no_row(memory: DeviceMemory) -> None:
    model = EchoModel(memory)
    memory.blocks[1] = 5
    result = Runner(model, memory, ImageRows(hidden=1)).run(Plan(1, StepKind.DECODE, (), clone_blocks=((1, 2),)))
    assert list(result.sampled) == []
    assert (model.seen, model.joined) == ([], 1)
    assert int(memory.blocks[2, 0]) == 5


def test_ids_outside_the_vocabulary_are_named(runner: Runner) -> None:
    def objection(*ids: int) -> str:
        return runner.objection(EngineRequest("r", ids, len(ids), SamplingParams()))

    assert objection(0, VOCABULARY - 1) == ""
    assert objection(1, VOCABULARY) == "token_ids[1] = 50 must lie in 0..49, the ids of this model's vocabulary"
    assert objection(-1) == "token_ids[0] = -1 must lie in 0..49, the ids of this model's vocabulary"
