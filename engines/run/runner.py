"""Run one plan on a model: copies first, then the forward, then one sampled token for each completed sequence."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from shoal.engines.core.plan import Plan, PlanItem, StepKind, StepResult
from shoal.engines.core.request import BranchToken, EngineRequest, TokenLogprobs
from shoal.engines.core.verify.estimators import StepTimes
from shoal.engines.model.batch import Batch
from shoal.engines.run.constraints import Constraints
from shoal.engines.run.drafting import Drafting
from shoal.engines.run.inputs import ImageRows, build_batch, scored_items
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.penalties import Penalties
from shoal.engines.run.prompt_scores import prompt_scores
from shoal.engines.run.sampler import sample
from torch import Tensor


class TokenModel(Protocol):
    """The language model with its caches bound."""

    @property
    def lookback(self) -> int:
        """Ids before a chunk that Engram reads."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Advance the caches by the batch's rows: hidden [S, H] of last rows in prefill, [T, H] in decode.

        In prefill all rows of scored sequences follow.
        """
        ...

    def join(self) -> None:
        """Take part in one forward of the other ranks without a row of one's own."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab]."""
        ...


class Runner:
    """Synchronous: when `run` returns, the step's KV is in the blocks and slots of `memory`.

    With `drafting`, decode steps verify drafts and make the next ones; each is timed by `clock` (seconds), on the
    thread that calls `run`.
    """

    def __init__(
        self,
        model: TokenModel,
        memory: DeviceMemory,
        images: ImageRows,
        constraints: Constraints | None = None,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._clock = clock
        self._drafting = drafting
        self._memory = memory
        self._images = images
        self._penalties = Penalties(model.eos_token_id)
        self._constraints = Constraints() if constraints is None else constraints

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan; an empty plan does its copies and joins. Rows with non-finite logits fail alone."""
        self._memory.clone_blocks(plan.clone_blocks)
        self._memory.clone_slots(plan.clone_slots)
        self._memory.zero_slots(plan.zero_slots)
        if not plan.items:
            self._model.join()
            return StepResult(())
        batch = build_batch(plan, self._images, self._model.lookback)
        began_s = self._clock()
        hidden = self._model.forward(batch)
        if self._drafting is not None and plan.kind is StepKind.DECODE:
            logits = self._model.logits(hidden)
            computed_s = self._clock()
            result = self._verified(self._drafting, plan.items, logits)
            forward_ms, rest_ms = 1e3 * (computed_s - began_s), 1e3 * (self._clock() - computed_s)
            return dataclasses.replace(result, times=StepTimes(len(plan.items), plan.rows, forward_ms, rest_ms))
        rows = last_rows(plan)
        complete = [i for i, item in enumerate(plan.items) if item.completes]
        logits = self._model.logits(hidden[[rows[i] for i in complete]]) if complete else hidden[:0]
        logits = self._penalties.apply(
            logits,
            [plan.items[i].sequence.request for i in complete],
            lambda row: plan.items[complete[row]].sequence.output_ids,
        )
        failed = tuple(self._constraints.apply([plan.items[i] for i in complete], logits))
        result = sampled_result(plan.items, complete, logits, failed)
        if scored := scored_items(plan):
            rows_of_scored = hidden[len(plan.items) :]
            scores = prompt_scores([plan.items[i] for i in scored], rows_of_scored, self._model.logits)
            result = replace(result, prompt_scores=scores)
        if any(item.sequence.request.branches for item in plan.items):
            return replace(result, branched=first_tokens([plan.items[i] for i in complete], logits))
        return result

    def _verified(self, drafting: Drafting, items: Sequence[PlanItem], logits: Tensor) -> StepResult:
        """Judge the rows [rows, vocab] of decode items; row j of an item stands behind its first j drafts."""
        owners = [(item, j) for item in items for j in range(item.rows)]
        logits = self._penalties.apply(
            logits,
            [item.sequence.request for item, _ in owners],
            lambda row: (*owners[row][0].sequence.output_ids, *owners[row][0].token_ids[1 : 1 + owners[row][1]]),
        )
        failed = tuple(self._constraints.apply_rows(items, logits))
        return drafting.step(items, logits, failed)

    def objection(self, request: EngineRequest) -> str:
        """Why the model cannot read this request's ids, with the rule; "" if it can."""
        limit = self._model.vocabulary
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(request.sampling, name):
                token = token[0] if isinstance(token, tuple) else token
                if not 0 <= token < limit:
                    return f"{name}: {token} must lie in 0..{limit - 1}, the ids of this model's vocabulary"
        if min(request.token_ids, default=0) >= 0 and max(request.token_ids, default=0) < limit:
            return ""
        index, token = next((i, t) for i, t in enumerate(request.token_ids) if not 0 <= t < limit)
        return f"token_ids[{index}] = {token} must lie in 0..{limit - 1}, the ids of this model's vocabulary"


def first_tokens(items: Sequence[PlanItem], logits: Tensor) -> tuple[tuple[str, tuple[BranchToken, ...]], ...]:
    """First tokens of the branches of prompts that are complete now; row i of logits [items, vocab] is item i's.

    A branch differs from its parent in the seed alone, so the parent's row, penalties and grammar applied, is its own.
    """
    rows = [
        (i, branch)
        for i, item in enumerate(items)
        if item.end == item.prompt_len  # not where outputs were computed again
        for branch in item.sequence.request.branches
    ]
    outcomes = sample(
        logits[[i for i, _ in rows]],
        [replace(items[i].sampling, seed=branch.seed) for i, branch in rows],
        [items[i].end for i, _ in rows],
    )
    firsts: dict[str, tuple[BranchToken, ...]] = {}
    for (i, branch), outcome in zip(rows, outcomes, strict=True):
        first = BranchToken(branch.request_id, branch.seed, outcome.token_id, outcome.logprobs)
        name = items[i].request_id
        firsts[name] = (*firsts.get(name, ()), first)
    return tuple(firsts.items())


def last_rows(plan: Plan) -> list[int]:
    """Row of the forward's result that predicts each item's next token."""
    if plan.kind is StepKind.PREFILL:
        return list(range(len(plan.items)))
    rows, end = [], 0
    for item in plan.items:
        end += item.rows
        rows.append(end - 1)
    return rows


def sampled_result(
    items: Sequence[PlanItem], complete: Sequence[int], logits: Tensor, refused: tuple[tuple[str, str], ...] = ()
) -> StepResult:
    """Sample the completed items (logits [len(complete), vocab]); the others get token 0, which nobody reads.

    `refused` items have failed already. The drawn token's position is the item's end: the random stream depends on the
    seed and on nothing else.
    """
    tokens = [0] * len(items)
    logprobs: list[TokenLogprobs | None] = [None] * len(items)
    failed: list[tuple[str, str]] = [*refused]
    outcomes = sample(logits, [items[i].sampling for i in complete], [items[i].end for i in complete])
    for i, outcome in zip(complete, outcomes, strict=True):
        tokens[i], logprobs[i] = outcome.token_id, outcome.logprobs
        if not outcome.is_valid:
            failed.append((items[i].request_id, f"the model gave no finite logits at position {items[i].end}"))
    return StepResult(sampled=tokens, logprobs=logprobs, failed=tuple(failed))
