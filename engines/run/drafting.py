"""Verify a decode step's drafts and make the next ones: acceptance, the draft pool, and the drafter between them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from shoal.engines.core.acceptance import Verified, accepted_prefix
from shoal.engines.core.plan import PlanItem, StepResult
from shoal.engines.core.request import SamplingParams, TokenLogprobs
from shoal.engines.model.drafter import DraftBlock, DraftChoice
from shoal.engines.run.acceptance import FRESH, Judged, judge, judge_by_draw
from shoal.engines.run.draft_pool import DraftPool
from shoal.engines.run.rng import DRAFT_SEED_OFFSET
from shoal.engines.run.sampler import GREEDY_BELOW, draw, final_logprobs, finite, first_largest, report
from torch import Tensor


class Drafter(Protocol):
    """A model that drafts out of its own caches."""

    def draft(self, golden: Tensor, positions: Tensor, slots: Tensor, choice: DraftChoice) -> DraftBlock:
        """Drafts after `golden` tokens int64 [S] of the sequences in state `slots`; `positions` are those before."""
        ...


class Limits(NamedTuple):
    """What ends a sequence besides its own parameters."""

    eos_token_id: int
    max_model_len: int


class PickedDrafts:
    """The DraftChoice of a batch: each request's own temperature, filters and random stream.

    `logprobs` float32 [S, n, V] are the final distributions of the first n drafts, one-hot where greedy; `valid` bool
    [S]: all its logits were finite. The words belong to the drafts' positions, `firsts` [S] and on, under the seed plus
    `seed_offset`.
    """

    def __init__(
        self, params: Sequence[SamplingParams], firsts: Sequence[int], count: int, vocabulary: int, seed_offset: int
    ) -> None:
        self._params, self._firsts, self._count, self._seed_offset = params, firsts, count, seed_offset
        self._greedy = torch.tensor([p.temperature < GREEDY_BELOW for p in params])
        self.logprobs = torch.full((len(params), count, vocabulary), -torch.inf)
        self.valid = torch.ones(len(params), dtype=torch.bool)

    def __call__(self, logits: Tensor, number: int) -> Tensor:
        """Tokens int64 [S] for draft `number`; those behind the last one wanted only fill the block."""
        if number >= self._count:
            return logits.argmax(-1)
        scores, valid = finite(logits)
        self.valid &= valid
        best, kept = first_largest(scores), self.logprobs[:, number]
        kept.scatter_(1, best.unsqueeze(1), 0.0)
        if bool(self._greedy.all()):
            return best
        drawn_from = final_logprobs(scores, self._params, self._greedy).float()
        kept[~self._greedy] = drawn_from[~self._greedy]
        # Drawn from the rounded values that are kept, since those are what the draft is judged by.
        rounded = torch.log_softmax(kept.double(), -1)
        drawn = draw(rounded, self._params, [first + number for first in self._firsts], self._seed_offset)
        return torch.where(self._greedy, best, drawn)


class Drafting:
    """Draft info of one engine's sequences; `drafts` are made and verified in each decode step.

    `by_draw`: a draft counts only if it is the token that the sampler draws without drafts (Determinism.FULL).
    """

    def __init__(self, drafter: Drafter, pool: DraftPool, limits: Limits, by_draw: bool = False) -> None:
        self._drafter, self._pool, self._limits, self._by_draw = drafter, pool, limits, by_draw

    @property
    def drafts(self) -> int:
        """Drafts a step."""
        return self._pool.tokens.shape[1]

    def step(self, items: Sequence[PlanItem], logits: Tensor, refused: tuple[tuple[str, str], ...] = ()) -> StepResult:
        """Judge the rows of decode items, logits float32 [rows, V], and draft behind what is output.

        `refused` requests have failed already.
        """
        judged = self._judge(items, logits)
        results: list[Verified] = []
        logprobs: list[TokenLogprobs | None] = []
        accepted_logprobs: list[list[TokenLogprobs]] = []
        failed, known = [*refused], {request_id for request_id, _ in refused}
        first = 0
        for item in items:
            rows = slice(first, first + item.rows)
            drafts = item.token_ids[1:]
            found = accepted_prefix(drafts, judged.accepted[rows].tolist(), judged.tokens[rows].tolist())
            last = first + len(found.accepted)
            if item.request_id in known:
                found = Verified((), 0)
            elif not bool(judged.valid[first : last + 1].all()):
                at = item.start + 1 + judged.valid[first : last + 1].tolist().index(False)
                failed.append((item.request_id, f"the model gave no finite logits at position {at}"))
                found = Verified((), 0)
            found = self._until_end(item, found)
            told = [self._report(judged, first + j, t, item) for j, t in enumerate(found.accepted)]
            accepted_logprobs.append([one for one in told if one is not None])
            logprobs.append(self._report(judged, last, found.sampled, item))
            results.append(found)
            first += item.rows
        drafts_made, confidences = self._draft(items, results, {name for name, _ in failed})
        return StepResult(
            sampled=[r.sampled for r in results],
            accepted=[r.accepted for r in results],
            logprobs=logprobs,
            failed=tuple(failed),
            drafts=drafts_made,
            confidences=confidences,
            accepted_logprobs=accepted_logprobs,
        )

    def _judge(self, items: Sequence[PlanItem], logits: Tensor) -> Judged:
        params = [item.sampling for item in items for _ in range(item.rows)]
        positions = [item.start + 1 + j for item in items for j in range(item.rows)]
        drafts = torch.full((len(params),), FRESH)
        is_by_token = self._by_draw or all(p.temperature < GREEDY_BELOW for p in params)
        proposals = torch.full((len(params), 1 if is_by_token else logits.shape[-1]), -torch.inf)
        first = 0
        for item in items:
            tokens, drawn_from = self._pool.read(item.read_slot, item.rows - 1)
            assert tuple(tokens.tolist()) == item.token_ids[1:], (
                f"{item.request_id}: slot {item.read_slot} is another's"
            )
            drafts[first : first + item.rows - 1] = tokens
            if not is_by_token:
                proposals[first : first + item.rows - 1] = drawn_from
            first += item.rows
        if self._by_draw:
            return judge_by_draw(logits, params, positions, drafts)
        return judge(logits, params, positions, drafts, proposals.expand(-1, logits.shape[-1]))

    def _until_end(self, item: PlanItem, found: Verified) -> Verified:
        """Without the accepted drafts behind one that ends the sequence: nobody will have seen them."""
        sequence, params = item.sequence, item.sampling
        room = min(params.max_tokens - sequence.output_tokens, self._limits.max_model_len + 1 - sequence.len)
        kept = found.accepted[: max(room, 1)]
        for count, token in enumerate(kept, 1):
            if self._is_stop(params, token):
                return Verified(kept[:count], found.sampled)
        return Verified(kept, found.sampled)

    def _is_stop(self, params: SamplingParams, token: int) -> bool:
        is_eos = token == self._limits.eos_token_id and not params.ignore_eos
        return is_eos or token in params.stop_token_ids

    def _report(self, judged: Judged, row: int, token: int, item: PlanItem) -> TokenLogprobs | None:
        if judged.logprobs is None or item.sampling.logprobs is None:
            return None
        return report(judged.logprobs[row], token, item.sampling.logprobs)

    def _draft(
        self, items: Sequence[PlanItem], results: Sequence[Verified], failed: set[str]
    ) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
        """The next drafts and their confidences of each item; () for a sequence that failed or whose drafter did."""
        drafts: list[tuple[int, ...]] = [()] * len(items)
        confidences: list[tuple[float, ...]] = [()] * len(items)
        live = [i for i, item in enumerate(items) if item.request_id not in failed and item.write_slot]
        if not live:
            return drafts, confidences
        lasts = [items[i].start + len(results[i].accepted) for i in live]
        vocabulary = self._pool.logprobs.shape[-1]
        # Judged by the draw, drafts are drawn with the words that will decide: both find the same token more often.
        offset = 0 if self._by_draw else DRAFT_SEED_OFFSET
        params, firsts = [items[i].sampling for i in live], [at + 2 for at in lasts]
        choice = PickedDrafts(params, firsts, self.drafts, vocabulary, offset)
        golden = torch.tensor([results[i].sampled for i in live])
        slots = torch.tensor([items[i].slot for i in live])
        block = self._drafter.draft(golden, torch.tensor(lasts), slots, choice)
        tokens = block.tokens[:, : self.drafts]
        confidence = torch.sigmoid(block.confidence_raw[:, : self.drafts].float())
        for row, i in enumerate(live):
            if any(self._is_stop(items[i].sampling, t) for t in (*results[i].accepted, results[i].sampled)):
                confidence[row] = 0.0  # it has ended: nothing of it is worth verifying (notes 8.5)
        good = choice.valid & torch.isfinite(confidence).all(-1)
        into = torch.tensor([items[i].write_slot for i in live])[good]
        self._pool.write(into, tokens[good], choice.logprobs[good], confidence[good])
        for row in good.nonzero().squeeze(1).tolist():
            drafts[live[row]] = tuple(tokens[row].tolist())
            confidences[live[row]] = tuple(confidence[row].tolist())
        return drafts, confidences
