"""A scheduler with a deterministic stand-in for the model, for scenarios and machines."""

from dataclasses import dataclass, field
from typing import Any

from shoal.engines.config import CacheConfig, EngineConfig, Role, Truncation, TruncationMode
from shoal.engines.core.acceptance import accepted_prefix
from shoal.engines.core.plan import Event, Plan, StepKind, StepResult
from shoal.engines.core.request import (
    BranchToken,
    EngineRequest,
    FinishEvent,
    SamplingParams,
    TokenLogprobs,
    TokensEvent,
)
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.vote import decide

EOS = 1


def config_of(role=Role.NORMAL, blocks=64, slots=16, **changes):
    fields = {
        "role": role,
        "max_model_len": 256,
        "step_tokens_max": 64,
        "sequences_max": 4,
        "truncation": Truncation(TruncationMode.COMPACT, keep=20),
        "cache": CacheConfig(16, blocks, slots),
    }
    return EngineConfig(**fields | changes)


def request_of(request_id, length, max_tokens=8, outputs=0, **fields):
    """A prompt whose ids tell their position; `outputs` of its tokens were produced by an earlier attempt."""
    sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens))
    ids = tuple(100 + i for i in range(length))
    return EngineRequest(request_id, ids, length - outputs, sampling, **fields)


def next_token(sequence_id: str, length: int) -> int:
    """What the stand-in samples: fixed by request and length, as a real model at temperature 0."""
    return 1000 + (hash_of(sequence_id) * 31 + length * 7) % 500


def hash_of(text: str) -> int:
    value = 7
    for letter in text:
        value = (value * 131 + ord(letter)) % 10_007
    return value


def drafts_of(sequence_id: str, length: int, count: int) -> list[int]:
    """What the stand-in drafts for the positions from `length` on: mostly right, now and then not."""
    positions = range(length, length + count)
    return [0 if hash_of(f"{sequence_id} {p}") % 4 == 0 else next_token(sequence_id, p) for p in positions]


def drafting_result(plan: Plan, drafts: int, failed=()) -> StepResult:
    """Verify the drafts among a decode plan's rows as the stand-in samples, and make the next ones."""
    verified = []
    for item in plan.items:
        truth = [next_token(item.request_id, item.start + 1 + row) for row in range(item.rows)]
        held = item.token_ids[1:]
        assert len(held) == item.rows - 1, f"{item.request_id}: {item.token_ids} are not {item.rows} rows"
        verified.append(accepted_prefix(held, [a == b for a, b in zip(held, truth, strict=False)], truth))
    lengths = [i.start + 2 + len(v.accepted) for i, v in zip(plan.items, verified, strict=True)]
    return StepResult(
        sampled=[v.sampled for v in verified],
        accepted=[v.accepted for v in verified],
        failed=failed,
        drafts=[drafts_of(i.request_id, n, drafts) for i, n in zip(plan.items, lengths, strict=True)],
        confidences=[[0.5] * drafts for _ in verified],
        logprobs=[TokenLogprobs(-1.0 * v.sampled) for v in verified],
        accepted_logprobs=[[TokenLogprobs(-1.0 * t) for t in v.accepted] for v in verified],
    )


def truth_of(item, position: int) -> int:
    """The token of a sequence's position, -1 before the first."""
    given = item.sequence.request.token_ids
    if position < 0:
        return -1
    return given[position] if position < len(given) else next_token(item.request_id, position)


def branched(plan: Plan):
    """First tokens of the branches of the prompts that a plan completes."""
    return tuple(
        (i.request_id, tuple(BranchToken(b.request_id, b.seed, next_token(b.request_id, i.end)) for b in branches))
        for i in plan.items
        if i.end == i.prompt_len and plan.kind is StepKind.PREFILL and (branches := i.sequence.request.branches)
    )


@dataclass
class Desk:
    """One scheduler; `step` plans, samples and commits, checking conservation at every stage."""

    scheduler: StepScheduler
    events: list[Event] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    memory: Any = None  # a MemoryModel that every step is checked against

    @classmethod
    def open(cls, config=None, verify=None, **rules):
        return cls(StepScheduler(config_of() if config is None else config, EOS, SchedulingRules(**rules), verify))

    def plan(self) -> Plan:
        scheduler = self.scheduler
        plan = scheduler.plan(decide([scheduler.ballot(now_us=0)]), now_us=0)
        scheduler.check()
        self.plans.append(plan)
        if self.memory is not None:
            self.memory.copy(plan)
            for item in plan.items:
                self.memory.compute(item, item.start, item.token_ids)
        return plan

    def commit(self, plan: Plan, tokens: dict[str, int] | None = None, failed=()) -> tuple[Event, ...]:
        given = tokens or {}
        if self.scheduler.rules.drafts and plan.kind is StepKind.DECODE:
            result = drafting_result(plan, self.scheduler.rules.drafts, tuple(failed))
        else:
            sampled = [given.get(i.request_id, next_token(i.request_id, i.end)) for i in plan.items]
            result = StepResult(sampled, failed=tuple(failed), branched=branched(plan))
        events = self.scheduler.commit(plan, result, now_us=0)
        self.scheduler.check()
        self.events += events
        return events

    def step(self, tokens: dict[str, int] | None = None) -> Plan:
        plan = self.plan()
        self.commit(plan, tokens)
        return plan

    def run_until_idle(self, steps_max=500):
        for _ in range(steps_max):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {steps_max} steps: {self.plans[-1]}")

    def waiting(self):
        return [s.request_id for s in self.scheduler.ledger.waiting]

    def running(self):
        return [s.request_id for s in self.scheduler.ledger.running]

    def free(self):
        ledger = self.scheduler.ledger
        return ledger.blocks.free_count, ledger.slots.free_count

    def tokens_of(self, request_id):
        found = tokens_in(e for e in self.events if e.request_id == request_id)
        indices = [index for index, _ in found]
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True, indices
        return [token_id for _, token_id in found]

    def ending_of(self, request_id):
        found = [e for e in self.events if isinstance(e, FinishEvent) and e.request_id == request_id]
        assert len(found) <= 1, found
        return found[0].reason if found else None


def tokens_in(events):
    """(index, id) of every output token among the events."""
    told = (e for e in events if isinstance(e, TokensEvent))
    return [(index, token_id) for e in told for index, token_id in enumerate(e.token_ids, e.index)]


def batch(plan):
    return [(i.request_id, i.start, i.rows) for i in plan.items]
