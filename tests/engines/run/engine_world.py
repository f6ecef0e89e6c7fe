"""A few engines in one process, with hand-off and store replaced by copies of their bytes; memory starts dirty."""

import dataclasses
import random
from dataclasses import dataclass, field

import torch
from shoal.engines.config import CacheConfig, EngineConfig, Role, Truncation, TruncationMode
from shoal.engines.core.grammar.matcher import Grammar
from shoal.engines.core.plan import Accepted, LoadTarget, Reservation, StepKind
from shoal.engines.core.request import EngineRequest, FinishEvent, ImageSpan, SamplingParams, TokensEvent
from shoal.engines.model.decoder import Model
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.engine import Engine
from shoal.engines.run.followers import Followers
from shoal.engines.run.load import build_engine
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.output import PromptReady, StepOutput
from shoal.engines.run.plain import replay

STEPS_MAX = 2000


@dataclass
class Rank:
    """One engine and everything it has given out so far."""

    engine: Engine
    memory: DeviceMemory
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishEvent] = field(default_factory=dict)
    prompts: dict[str, PromptReady] = field(default_factory=dict)
    grains: dict[tuple[str, int], bytes] = field(default_factory=dict)
    anchors: dict[tuple[str, int], bytes] = field(default_factory=dict)
    outputs: list[StepOutput] = field(default_factory=list)

    def step(self, verdict: StepKind | None = None) -> StepOutput:
        output = self.engine.step(len(self.outputs), verdict)
        self.engine.check()
        for event in output.events:
            if isinstance(event, TokensEvent):
                produced = self.tokens.setdefault(event.request_id, [])
                assert event.index == len(produced) + self.first_index(event.request_id), "a token repeated or lost"
                produced += event.token_ids
            else:
                assert event.request_id not in self.finished, "a request ended twice"
                self.finished[event.request_id] = event
        self.prompts.update({p.request_id: p for p in output.prompts})
        self.grains.update({(g.request_id, g.index): g.payload for g in output.grains})
        self.anchors.update({(a.request_id, a.tokens): a.payload for a in output.anchors})
        self.outputs.append(output)
        return output

    first: dict[str, int] = field(default_factory=dict)

    def first_index(self, request_id: str) -> int:
        return self.first.get(request_id, 0)

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(STEPS_MAX):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {STEPS_MAX} steps: {self.engine.capacity()}")


class World:
    """Engines over one model, random requests, and the plain loop that judges them."""

    def __init__(self, model: Model, keep: int, block_tokens: int, seed: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.truncation = Truncation(TruncationMode.COMPACT, keep)
        self.dice = random.Random(seed)
        self.images: dict[bytes, torch.Tensor] = {}

    def config(self, role: Role, **settings: object) -> EngineConfig:
        """Small pools, so that prompts compete for them."""
        config = EngineConfig(
            role=role,
            max_model_len=1024,
            truncation=self.truncation,
            cache=CacheConfig(block_tokens=self.block_tokens, blocks_count=64, slots_count=12),
            recompute_preempted=role is not Role.COMPLETION,
        )
        return dataclasses.replace(config, **settings)

    def rank(self, role: Role, saves: bool = False, followers: Followers | None = None, **settings: object) -> Rank:
        """An engine whose memory holds garbage and hands out blocks in random order."""
        config = self.config(role, **settings)
        engine, memory = build_engine(self.model, config, saves_grains=saves, followers=followers)
        self.soil(memory)
        for pool in (engine._scheduler.ledger.blocks, engine._scheduler.ledger.slots):
            taken = list(pool.allocate(pool.free_count))
            self.dice.shuffle(taken)
            pool.free(tuple(taken))
        return Rank(engine, memory)

    def soil(self, memory: DeviceMemory) -> None:
        """Fill memory with garbage."""
        generator = torch.Generator().manual_seed(self.dice.getrandbits(32))
        for pool in (memory.blocks, memory.slots):
            pool.copy_(torch.randint(0, 256, pool.shape, generator=generator, dtype=torch.uint8))

    def request(
        self, name: str, length: int, sampling: SamplingParams, images: tuple[int, ...] = (), **fields: object
    ) -> EngineRequest:
        """A random prompt; `images` are positions where an image of 8 tokens starts."""
        ids = [self.dice.randrange(3, 900) for _ in range(length)]
        spans = tuple(self.image(f"{name}/{start}", start) for start in images)
        for span in spans:
            ids[span.start : span.end] = [self.model.config.image_token_id] * span.length
        return EngineRequest(name, tuple(ids), length, sampling, spans, **fields)

    def image(self, name: str, start: int) -> ImageSpan:
        """An image of 2 x 2 tokens with random rows."""
        generator = torch.Generator().manual_seed(self.dice.getrandbits(32))
        rows = torch.randn(8, self.model.config.hidden, generator=generator).to(torch.bfloat16)
        self.images[name.encode()] = rows
        return ImageSpan(start, 8, 2, 2, name.encode())

    def submit(self, rank: Rank, request: EngineRequest) -> None:
        """Queue a request and give it its images at once."""
        assert isinstance(rank.engine.submit(request, now_us=0), Accepted)
        rank.first[request.request_id] = len(request.token_ids) - request.prompt_len
        for span in request.images:
            rank.engine.image_ready(request.request_id, span.digest, self.images[span.digest])

    def hand_off(self, source: Rank, target: Rank, request_id: str, grammar: Grammar | None = None) -> None:
        """Copy a finished prompt's blocks and slot, and admit it."""
        prompt = source.prompts[request_id]
        room = target.engine.reserve(request_id, len(prompt.state.token_ids), now_us=0)
        assert isinstance(room, Reservation)
        there = room.blocks[: len(prompt.blocks)]
        target.memory.blocks[list(there)] = source.memory.blocks[list(prompt.blocks)]
        target.memory.slots[room.slot] = source.memory.slots[prompt.slot]
        sums = source.memory.checksums(prompt.blocks, prompt.slot)
        assert target.memory.checksums(there, room.slot) == sums
        assert source.engine.release(request_id)
        assert isinstance(target.engine.admit(room, prompt.state, 0, grammar), Accepted)
        target.first[request_id] = len(prompt.state.token_ids) - prompt.state.request.prompt_len

    def load_hit(self, rank: Rank, request: EngineRequest, saved: Rank, name: str) -> None:
        """Bring a hit in from what another engine saved under `name`."""
        assert rank.engine.loads_wanted() == (request.request_id,)
        hit = request.hit_tokens
        grains = [saved.grains[name, i] for i in range(hit // self.block_tokens)]
        loaded = rank.engine.load_hit(request.request_id, grains, saved.anchors[name, hit])
        assert isinstance(loaded, LoadTarget)

    def check(self, request: EngineRequest, outputs: list[int]) -> None:
        """The outputs are those of the plain loop."""
        assert outputs, f"{request.request_id} produced nothing"
        drawn = replay(WholeSequence(self.model), request, outputs, self.images, self.truncation)
        assert outputs == [d.token_id for d in drawn], request.request_id

    def sampling(self, count: int, greedy: bool | None = None) -> SamplingParams:
        """Greedy or seeded parameters for `count` outputs, a third of them with penalties."""
        if greedy if greedy is not None else self.dice.random() < 0.4:
            return self.penalised(SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        drawn = SamplingParams(
            temperature=self.dice.choice([0.5, 1.0, 1.3]),
            top_p=self.dice.choice([1.0, 0.9]),
            top_k=self.dice.choice([-1, 50]),
            seed=self.dice.getrandbits(64),
            max_tokens=count,
            ignore_eos=True,
        )
        return self.penalised(drawn)

    def penalised(self, sampling: SamplingParams) -> SamplingParams:
        """The same, or with penalties that are strong enough to change most tokens."""
        if self.dice.random() < 0.67:
            return sampling
        return dataclasses.replace(
            sampling,
            min_tokens=self.dice.randrange(3),
            logit_bias=tuple((self.dice.randrange(900), self.dice.uniform(-9, 9)) for _ in range(2)),
            presence_penalty=self.dice.choice([0.0, 1.5]),
            frequency_penalty=self.dice.choice([0.0, -1.0]),
            repetition_penalty=self.dice.choice([1.0, 1.4]),
        )
