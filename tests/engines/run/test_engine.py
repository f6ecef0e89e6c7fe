"""The engine's verbs over a runner that hashes prefixes: waiting, hits, failures, aborts, saves, conservation."""

import random
import zlib

import pytest
import torch
from shoal.engines.config import CacheConfig, EngineConfig, Role, Truncation, TruncationMode
from shoal.engines.core.plan import Accepted, LoadTarget, Plan, Reservation, StepResult
from shoal.engines.core.request import (
    EngineRequest,
    FinishEvent,
    FinishReason,
    ImageSpan,
    NoRoom,
    Rejected,
    SamplingParams,
    TokensEvent,
)
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.run.engine import Engine
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.output import StepOutput

GRAIN = 4
EOS = 1
FIRST = ImageSpan(1, 4, 1, 1, b"first")
SECOND = ImageSpan(9, 4, 1, 1, b"second")


class HashRunner:
    """The next token is a hash of the whole prefix; requests named in `broken` fail."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def run(self, plan: Plan) -> StepResult:
        tokens = [zlib.crc32(repr(i.sequence.token_slice(0, i.end)).encode()) % 997 + 2 for i in plan.items]
        failed = tuple((i.request_id, "no logits") for i in plan.items if i.request_id in self.broken)
        return StepResult(tokens, failed=failed)

    def objection(self, request: EngineRequest) -> str:
        return "an id is negative" if min(request.token_ids) < 0 else ""


class NamedMemory:
    """Grains and anchors are names; what is written is kept."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], bytes] = {}

    def read_block(self, block: int) -> bytes:
        return f"block {block}".encode()

    def write_block(self, block: int, payload: bytes) -> None:
        if not payload.startswith(b"block"):
            raise ValueError("not a block")
        self.written["block", block] = payload

    def read_stored(self, slot: int, end: int) -> bytes:
        return f"slot {slot} at {end}".encode()

    def write_stored(self, slot: int, payload: bytes) -> None:
        self.written["slot", slot] = payload


class Bench:
    """An engine and everything it reported."""

    def __init__(self, role: Role, saves: bool = True, blocks: int = 40) -> None:
        config = EngineConfig(
            role=role,
            max_model_len=200,
            step_tokens_max=16,
            sequences_max=8,
            recompute_preempted=role is not Role.COMPLETION,
            truncation=Truncation(TruncationMode.COMPACT, keep=6),
            cache=CacheConfig(block_tokens=GRAIN, blocks_count=blocks, slots_count=12),
        )
        self.runner, self.memory, self.images = HashRunner(), NamedMemory(), ImageRows(hidden=2)
        self.engine = Engine(config, StepScheduler(config, EOS), self.runner, self.memory, self.images, saves)
        self.outputs: list[StepOutput] = []

    def step(self) -> StepOutput:
        output = self.engine.step(now_us=len(self.outputs))
        self.engine.check()
        self.outputs.append(output)
        return output

    def run(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def tokens(self, name: str) -> list[int]:
        events = (e for o in self.outputs for e in o.events)
        return [t for e in events if isinstance(e, TokensEvent) and e.request_id == name for t in e.token_ids]

    def endings(self, name: str) -> list[FinishReason]:
        events = (e for o in self.outputs for e in o.events)
        return [e.reason for e in events if isinstance(e, FinishEvent) and e.request_id == name]

    def is_empty(self) -> bool:
        capacity = self.engine.capacity()
        return (capacity.blocks_free, capacity.slots_free) == (capacity.blocks_count, 11) and len(self.images) == 0


def asked(name: str, length: int = 10, outputs: int = 3, **fields: object) -> EngineRequest:
    return EngineRequest(name, tuple(range(10, 10 + length)), length, SamplingParams(max_tokens=outputs), **fields)


def rows(span: ImageSpan) -> torch.Tensor:
    return torch.ones(span.length, 2)


def test_a_request_waits_for_all_its_images() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, images=(FIRST, SECOND)), 0)
    assert bench.step().rows == 0
    assert bench.engine.image_ready("r", b"second", rows(SECOND))
    assert bench.step().rows == 0
    assert bench.engine.image_ready("r", b"first", rows(FIRST))
    bench.run()
    assert bench.endings("r") == [FinishReason.LENGTH]
    assert bench.is_empty()


def test_images_that_nobody_waits_for_are_not_kept() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, images=(FIRST,)), 0)
    assert not bench.engine.image_ready("r", b"other", rows(FIRST))
    assert not bench.engine.image_ready("gone", b"first", rows(FIRST))
    assert len(bench.images) == 0
    assert bench.engine.image_ready("r", b"first", rows(FIRST))
    assert not bench.engine.image_ready("r", b"first", rows(FIRST)), "a second delivery is late"


@pytest.mark.parametrize("wrong", [torch.ones(3, 2), torch.full((4, 2), torch.nan)])
def test_rows_that_cannot_be_the_images_end_the_request(wrong: torch.Tensor) -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, images=(FIRST,)), 0)
    bench.engine.submit(asked("other"), 0)
    assert not bench.engine.image_ready("r", b"first", wrong)
    bench.run()
    assert bench.endings("r") == [FinishReason.ERROR]
    assert bench.endings("other") == [FinishReason.LENGTH]
    assert bench.is_empty()


def test_requests_that_no_step_could_compute_are_rejected() -> None:
    bench = Bench(Role.NORMAL)
    odd = EngineRequest("odd", (5, -1), 2, SamplingParams())
    assert bench.engine.submit(odd, 0) == Rejected("odd", "an id is negative")
    longer = ImageSpan(9, 5, 1, 1, b"first")
    answer = bench.engine.submit(asked("r", 16, images=(FIRST, longer)), 0)
    assert isinstance(answer, Rejected)
    assert "equal digests mean equal rows" in answer.reason
    assert not bench.engine.has_work


def test_an_engine_whose_requests_only_wait_may_sleep() -> None:
    """Until images, hits or memory come; then it has work again."""
    bench = Bench(Role.PROMPT, blocks=6)
    bench.engine.submit(asked("r", 16, images=(FIRST,)), 0)
    assert bench.engine.has_work
    assert not bench.step()
    assert not bench.engine.has_work
    bench.engine.image_ready("r", b"first", rows(FIRST))
    assert bench.engine.has_work
    assert bench.step()
    bench.engine.submit(asked("next", 16), 0)
    bench.run()
    assert bench.endings("next") == []
    bench.engine.release("r")
    assert bench.engine.has_work, "its memory is free now"
    bench.run()
    assert bench.outputs[-1].prompts or bench.outputs[-2].prompts


def test_a_hit_is_written_where_the_sequence_reads_it() -> None:
    bench = Bench(Role.NORMAL, saves=False)
    request = asked("r", 16, hit_tokens=8, images=(FIRST, SECOND))
    bench.engine.submit(request, 0)
    bench.engine.image_ready("r", b"second", rows(SECOND))
    assert bench.step().rows == 0, "its hit is not there"
    target = bench.engine.load_hit("r", [b"block a", b"block b"], b"anchor")
    assert isinstance(target, LoadTarget)
    first, second = target.blocks
    assert bench.memory.written == {
        ("block", first): b"block a",
        ("block", second): b"block b",
        ("slot", target.slot): b"anchor",
    }
    assert bench.step().rows == 8, "only what the hit does not cover, and the first image is not needed"


def test_a_missed_hit_asks_for_the_images_it_covered() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, hit_tokens=8, images=(FIRST,)), 0)
    assert bench.engine.loads_wanted() == ("r",)
    assert bench.engine.hit_missed("r") == (b"first",)
    assert bench.engine.loads_wanted() == (), "nobody should fetch it again"
    assert bench.step().rows == 0
    bench.engine.image_ready("r", b"first", rows(FIRST))
    assert bench.step().rows == 16
    assert bench.engine.hit_missed("unknown") == ()


def test_a_hit_of_another_model_is_a_miss() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, hit_tokens=8), 0)
    assert bench.engine.load_hit("r", [b"noise", b"noise"], b"anchor") == Rejected("r", "not a block")
    assert bench.step().rows == 0
    bench.engine.hit_missed("r")
    assert bench.step().rows == 16
    bench.run()
    assert bench.is_empty()


def test_a_short_hit_is_refused_and_takes_no_memory() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, hit_tokens=8), 0)
    answer = bench.engine.load_hit("r", [b"block a"], b"anchor")
    assert isinstance(answer, Rejected)
    assert "takes 2 grains, got 1" in answer.reason
    assert bench.is_empty()
    assert isinstance(bench.engine.load_hit("gone", [b"block a"], b"anchor"), Rejected)


def test_a_hit_without_room_may_be_tried_again() -> None:
    bench = Bench(Role.NORMAL, blocks=9)
    bench.engine.submit(asked("big", 20, outputs=2), 0)
    bench.step()
    bench.engine.submit(asked("r", 16, hit_tokens=8), 0)
    assert isinstance(bench.engine.load_hit("r", [b"block a", b"block b"], b"anchor"), NoRoom)
    assert bench.memory.written == {}
    for _ in range(6):
        bench.step()
    assert isinstance(bench.engine.load_hit("r", [b"block a", b"block b"], b"anchor"), LoadTarget)


def test_a_preempted_request_whose_hit_spared_an_image_ends_alone() -> None:
    """Nine blocks of 4 for two sequences that grow to 24 tokens: one is preempted, and its image was never here."""
    bench = Bench(Role.NORMAL, blocks=11)
    for name in ("a", "b"):
        bench.engine.submit(asked(name, 14, outputs=12, hit_tokens=8, images=(FIRST,)), 0)
        bench.engine.load_hit(name, [b"block a", b"block b"], b"anchor")
    bench.run()
    assert sorted(bench.endings("a") + bench.endings("b")) == [FinishReason.ERROR, FinishReason.LENGTH]
    assert bench.is_empty()


def test_a_failing_request_ends_alone() -> None:
    bench = Bench(Role.NORMAL)
    for name in ("a", "b", "c"):
        bench.engine.submit(asked(name, 5), 0)
    bench.step()
    bench.runner.broken.add("b")
    bench.run()
    assert bench.endings("b") == [FinishReason.ERROR]
    assert bench.endings("a") == bench.endings("c") == [FinishReason.LENGTH]
    assert len(bench.tokens("b")) == 1
    assert bench.is_empty()


def test_an_image_that_cannot_be_encoded_ends_its_request() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 16, images=(FIRST,)), 0)
    assert bench.engine.fail("r", "the image has no pixels")
    bench.run()
    assert bench.endings("r") == [FinishReason.ERROR]
    assert bench.outputs[0].events[0] == FinishEvent("r", FinishReason.ERROR, 0, "the image has no pixels")


def test_prefill_saves_each_grain_once_and_anchors_at_checkpoints() -> None:
    bench = Bench(Role.PROMPT)
    bench.engine.submit(asked("r", 30, checkpoints=(24, 28)), 0)
    bench.run()
    grains = [g for o in bench.outputs for g in o.grains]
    assert [g.index for g in grains] == list(range(7))
    assert grains[2].token_ids == tuple(range(18, 22))
    assert [a.tokens for o in bench.outputs for a in o.anchors] == [24, 28]
    assert [c.cached for o in bench.outputs for c in o.chunks] == [16, 24, 28, 30]


def test_decode_saves_the_grain_and_the_anchor_it_completes() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("r", 6, outputs=9), 0)
    bench.run()
    grains = [g for o in bench.outputs for g in o.grains]
    assert [g.index for g in grains] == [0, 1, 2]
    whole = (*range(10, 16), *bench.tokens("r"))
    assert [g.token_ids for g in grains] == [whole[0:4], whole[4:8], whole[8:12]]
    assert [a.tokens for o in bench.outputs for a in o.anchors] == [8, 12]


def test_saving_is_off_unless_asked_for() -> None:
    bench = Bench(Role.NORMAL, saves=False)
    bench.engine.submit(asked("r", 30, checkpoints=(24,)), 0)
    bench.run()
    assert not any(o.grains or o.anchors for o in bench.outputs)


def test_a_prompt_is_owned_until_released() -> None:
    bench = Bench(Role.PROMPT)
    bench.engine.submit(asked("r", 16, images=(FIRST,)), 0)
    bench.engine.image_ready("r", b"first", rows(FIRST))
    bench.run()
    prompt = bench.outputs[-1].prompts[0]
    assert prompt.state.token_ids == (*range(10, 26), *bench.tokens("r"))
    assert len(prompt.blocks) == 4
    assert not bench.is_empty()
    assert bench.engine.release("r")
    assert bench.is_empty()
    assert not bench.engine.release("r")


def test_a_completion_engine_goes_on_where_the_prompt_engine_stopped() -> None:
    source, target, alone = Bench(Role.PROMPT), Bench(Role.COMPLETION), Bench(Role.NORMAL)
    for bench in (source, alone):
        bench.engine.submit(asked("r", 16, outputs=6), 0)
        bench.run()
    prompt = source.outputs[-1].prompts[0]
    room = target.engine.reserve("r", 17, now_us=0)
    assert isinstance(room, Reservation)
    assert target.engine.capacity().reserved == 1
    assert isinstance(target.engine.admit(room, prompt.state, now_us=0), Accepted)
    assert isinstance(target.engine.admit(room, prompt.state, now_us=0), Rejected), "admitted once"
    target.run()
    assert source.tokens("r") + target.tokens("r") == alone.tokens("r")
    assert target.is_empty()
    other = target.engine.reserve("other", 17, now_us=0)
    assert isinstance(other, Reservation)
    assert target.engine.cancel(other)
    assert not target.engine.cancel(other)
    assert target.is_empty()


def test_capacity_tells_what_is_queued() -> None:
    bench = Bench(Role.NORMAL)
    bench.engine.submit(asked("a", 20), 0)
    bench.engine.submit(asked("b", 16, hit_tokens=8), 0)
    capacity = bench.engine.capacity()
    assert (capacity.waiting, capacity.waiting_tokens, capacity.uncached_tokens) == (2, 36, 28)
    bench.step()
    assert bench.engine.capacity().uncached_tokens == 12


@pytest.mark.parametrize("seed", range(4))
def test_an_abort_storm_leaves_nothing_behind(seed: int) -> None:
    """Requests with images and hits are aborted at random points; every one of them ends exactly once."""
    dice, bench = random.Random(seed), Bench(Role.NORMAL, blocks=30)
    open_requests: dict[str, EngineRequest] = {}
    for number in range(150):
        name = f"r{number}"
        images = (FIRST, SECOND)[: dice.randrange(3)]
        request = asked(name, dice.randrange(14, 40), dice.randrange(1, 9), images=images)
        if dice.random() < 0.3:
            request = asked(name, 20, 4, images=images, hit_tokens=8)
        if isinstance(bench.engine.submit(request, number), Accepted):
            open_requests[name] = request
        for other in dice.sample(sorted(open_requests), min(3, len(open_requests))):
            for span in open_requests[other].images:
                bench.engine.image_ready(other, span.digest, rows(span))
            if other in bench.engine.loads_wanted():
                if dice.random() < 0.5:
                    bench.engine.hit_missed(other)
                else:
                    bench.engine.load_hit(other, [b"block", b"block"], b"anchor")
            if dice.random() < 0.4:
                bench.engine.abort(other)
        bench.step()
    for name in open_requests:
        bench.engine.abort(name)
    bench.run()
    assert all(len(bench.endings(name)) == 1 for name in open_requests)
    endings = {bench.endings(name)[0] for name in open_requests}
    # An error is a preempted request whose images its hit had spared.
    assert {FinishReason.ABORT, FinishReason.LENGTH} <= endings <= {*FinishReason} - {FinishReason.STOP}
    assert bench.is_empty()
