"""A stand-in for the model whose tokens depend on what blocks and slots hold: bytes gone wrong give wrong tokens."""

import time
import zlib
from pathlib import Path

import numpy as np
from shoal.balancers.reports import GroupRef
from shoal.cluster.live.engine_build import Built, registered
from shoal.cluster.live.names import role_of
from shoal.cluster.live.spec import ClusterSpec
from shoal.engines.config import EngineConfig
from shoal.engines.core.layout import block_layout, slot_layout
from shoal.engines.core.plan import Plan, PlanItem, StepResult
from shoal.engines.core.request import BranchToken, EngineRequest
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.config import ModelConfig
from shoal.engines.run.engine import Engine
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.memory import DeviceMemory

EOS = 1
EOS_EVERY = 40  # one prefix in so many is followed by the end token
STEP_S = 0.001  # so that requests are found in every stage


def hashed(parent: int, token_id: int) -> int:
    """The prefix hash after one more token."""
    return zlib.crc32(token_id.to_bytes(4, "little"), parent)


def next_token(prefix: int) -> int:
    """What follows a prefix; sometimes the end."""
    return EOS if prefix % EOS_EVERY == 0 else 16 + prefix % 800


def expected(token_ids: tuple[int, ...], outputs: int, ignore_eos: bool) -> list[int]:
    """What every engine must answer."""
    prefix = 0
    for token_id in token_ids:
        prefix = hashed(prefix, token_id)
    answer: list[int] = []
    while len(answer) < outputs:
        answer.append(next_token(prefix))
        if answer[-1] == EOS and not ignore_eos:
            break
        prefix = hashed(prefix, answer[-1])
    return answer


class ContentRunner:
    """Keeps the hash of every prefix in the block of its last token, and that of the whole in the slot."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._blocks = memory.blocks.numpy()
        self._slots = memory.slots.numpy()
        self._tokens = memory.block_layout.block_tokens

    def run(self, plan: Plan) -> StepResult:
        for source, target in plan.clone_blocks:
            if target:
                self._blocks[target] = self._blocks[source]
        for source, target in plan.clone_slots:
            if target:
                self._slots[target] = self._slots[source]
        self._slots[list(plan.zero_slots)] = 0
        time.sleep(STEP_S)
        tokens = [self._compute(item) for item in plan.items]
        return StepResult(
            tokens,
            branched=tuple(
                (item.request_id, tuple(BranchToken(b.request_id, b.seed, token) for b in branches))
                for item, token in zip(plan.items, tokens, strict=True)
                if item.end == item.prompt_len and (branches := item.sequence.request.branches)
            ),
        )

    def objection(self, request: EngineRequest) -> str:
        return "an id is negative" if min(request.token_ids) < 0 else ""

    def _compute(self, item: PlanItem) -> int:
        prefix = self._at(item, item.start - 1)[0] if item.start else np.uint32(0)
        slot = self._slots[item.slot, :4].view(np.uint32)
        if item.start and slot[0] != prefix:
            return 15  # the slot is another sequence's, or another moment's: no right answer has this token
        prefix = int(prefix)
        for position, token_id in enumerate(item.token_ids, item.start):
            prefix = hashed(prefix, token_id)
            self._at(item, position)[0] = prefix
        slot[0] = prefix
        return next_token(prefix)

    def _at(self, item: PlanItem, position: int) -> np.ndarray:
        block, place = item.block_table[position // self._tokens], position % self._tokens
        assert block, f"{item.request_id} writes into the null block"
        return self._blocks[block, place * 4 : place * 4 + 4].view(np.uint32)


def build_engine(config: EngineConfig, model_dir: Path) -> tuple[Engine, DeviceMemory]:
    """An engine of the checkpoint's sizes without its weights."""
    model = ModelConfig.from_dir(model_dir)
    shape = cache_shape(model, config.cache.block_tokens)
    memory = DeviceMemory(config.cache.blocks_count, block_layout(shape), config.cache.slots_count, slot_layout(shape))
    images = ImageRows(model.hidden)
    scheduler = StepScheduler(config, EOS)
    return Engine(config, scheduler, ContentRunner(memory), memory, images, saves_grains=True), memory


def build(spec: ClusterSpec, group: GroupRef, transfer_of) -> Built:
    """What an engine actor opens with."""
    engine, memory = build_engine(spec.engine(role_of(group)), Path(spec.model_dir))
    return Built(engine, memory, registered(transfer_of, group, memory), {"all": "prefix hashes"})
