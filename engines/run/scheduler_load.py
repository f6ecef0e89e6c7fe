"""Sequences in steady decode under the live StepScheduler, with made-up results: what a step costs without a model."""

import random
import time
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from shoal.engines.config import CacheConfig, EngineConfig, Role
from shoal.engines.core.plan import Plan, StepKind, StepResult
from shoal.engines.core.request import EngineRequest, SamplingParams, TokensEvent
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.core.vote import decide

BLOCK_TOKENS = 128
VOCABULARY = 129_280
# Chances that a draft is accepted once those before it were: 3.16 tokens a step from five drafts, about what is
# reported of DSpark (3.2 to 3.5). The same numbers are drawn for a peer.
CHANCES = (0.82, 0.72, 0.66, 0.60, 0.55)


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` of `prompt_tokens` each in steady decode, for up to `steps` steps, with `drafts` a step."""

    sequences: int
    drafts: int
    steps: int
    prompt_tokens: int = 4096

    @property
    def tokens_max(self) -> int:
        """Tokens a sequence may come to, with room for the steps that bring it into decode."""
        return self.prompt_tokens + (self.steps + 64) * (1 + self.drafts)

    @property
    def blocks_count(self) -> int:
        """Blocks for all of them, and one more each."""
        return self.sequences * (-(-self.tokens_max // BLOCK_TOKENS) + 2) + 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step: microseconds of this thread's processor time and of the wall, and the tokens it output."""

    cpu_us: float
    wall_us: float
    tokens: int


class DecodeLoad(Protocol):
    """Somebody's scheduler with a case's sequences in steady decode."""

    def step(self) -> StepCost:
        """Plan and commit one step of all sequences; the time to make up its result is not counted."""
        ...


class Outcomes:
    """Seeded outcomes of verification: how many drafts of a sequence are accepted, and token ids."""

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)

    def accepted(self, verified: int) -> list[int]:
        """The accepted ones among `verified` drafts."""
        count = 0
        while count < verified and self._random.random() < CHANCES[min(count, len(CHANCES) - 1)]:
            count += 1
        return self.tokens(count)

    def tokens(self, count: int) -> list[int]:
        """Any ids that end nothing."""
        return [self._random.randrange(10, 100_000) for _ in range(count)]

    def confidences(self, count: int) -> list[float]:
        """Of each draft, around its chance."""
        return [min(1.0, CHANCES[min(i, len(CHANCES) - 1)] * self._random.uniform(0.7, 1.3)) for i in range(count)]


class OurLoad:
    """Ballot, vote of one, plan and commit of `StepScheduler`; with `verify` the number of rows is chosen too."""

    def __init__(self, case: Case, verify: VerifySettings | None = None) -> None:
        count = case.sequences
        config = EngineConfig(
            role=Role.NORMAL,
            max_model_len=case.tokens_max,
            step_tokens_max=max(65_536, count * (1 + case.drafts)),
            sequences_max=count,
            watermark=1.0,
            cache=CacheConfig(BLOCK_TOKENS, case.blocks_count, count + 1),
        )
        rules = SchedulingRules(drafts=case.drafts, pad_token_id=VOCABULARY - 1)
        chooser = None if verify is None else VerifyLengths(verify)
        self._scheduler = StepScheduler(config, eos_token_id=1, rules=rules, verify=chooser)
        self._case = case
        self._outcomes = Outcomes()
        self._now_us = 0
        sampling = SamplingParams(max_tokens=case.tokens_max, ignore_eos=True)
        for index in range(count):
            ids = tuple(self._outcomes.tokens(case.prompt_tokens))
            self._scheduler.submit(EngineRequest(f"r{index:05d}", ids, len(ids), sampling), now_us=0)
        while self._scheduler.ledger.waiting:
            self.step()

    def step(self) -> StepCost:
        """One step; asserts that a decode step has all sequences."""
        scheduler = self._scheduler
        self._now_us += 10_000
        worked, began = time.thread_time_ns(), time.perf_counter_ns()
        plan = scheduler.plan(decide([scheduler.ballot(self._now_us)]), self._now_us)
        cpu_ns, wall_ns = time.thread_time_ns() - worked, time.perf_counter_ns() - began
        result = self._result(plan)
        worked, began = time.thread_time_ns(), time.perf_counter_ns()
        events = scheduler.commit(plan, result, self._now_us)
        cpu_ns += time.thread_time_ns() - worked
        wall_ns += time.perf_counter_ns() - began
        tokens = sum(len(event.token_ids) for event in events if isinstance(event, TokensEvent))
        full = plan.kind is StepKind.PREFILL or len(plan.items) == self._case.sequences
        assert full, f"{len(plan.items)} of {self._case.sequences} sequences in a decode step"
        return StepCost(cpu_ns / 1e3, wall_ns / 1e3, tokens)

    def _result(self, plan: Plan) -> StepResult:
        outcomes, drafts, count = self._outcomes, self._case.drafts, len(plan.items)
        sampled = outcomes.tokens(count)
        if not drafts or plan.kind is StepKind.PREFILL:
            return StepResult(sampled)
        return StepResult(
            sampled=sampled,
            accepted=[outcomes.accepted(item.rows - 1) for item in plan.items],
            drafts=[outcomes.tokens(drafts) for _ in range(count)],
            confidences=[outcomes.confidences(drafts) for _ in range(count)],
        )


def expected_tokens(drafts: int) -> float:
    """Mean tokens a step of a sequence that verifies so many drafts, by CHANCES."""
    chances = (CHANCES[min(i, len(CHANCES) - 1)] for i in range(drafts))
    return 1.0 + sum(accumulate(chances, mul), 0.0)
