"""Draft, verify, rewind: offline speculative decoding of several sequences over one model's real caches.

One step for each sequence: the drafter proposes k tokens after the golden one, one decode forward of k + 1 rows gives
the model's own opinion, and the sequence goes on behind what was accepted. Rejected rows stay in the caches: rings
have room for them beside the window, and the next step starts at or before the first of them and writes as many rows,
so it overwrites each before anything reads it (model notes, rollback).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from shoal.engines.config import Truncation
from shoal.engines.core.layout import blocks_needed
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.decoder import Model
from shoal.engines.run.inputs import NO_TOKEN, padded_lookback
from shoal.engines.toy.evaluate.acceptance import Step
from shoal.engines.toy.evaluate.choice import Choice
from shoal.engines.toy.evaluate.sitting import Question
from torch import Tensor

PREFILL_ROWS = 512


class Drafts(NamedTuple):
    """Proposals for n sequences: tokens int64 [n, k], logits [n, k, V] they were drawn from, confidence [n, k]."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class Speculator(Protocol):
    """S sequences whose prompts are computed; `live` int64 [n] names those that go on."""

    def draft(self, golden: Tensor, live: Tensor, choice: Choice) -> Drafts:
        """Proposals after the golden tokens int64 [n]."""
        ...

    def verify(self, golden: Tensor, drafts: Tensor, live: Tensor) -> Tensor:
        """The model's logits [n, k + 1, V] after the golden token and after each draft."""
        ...

    def advance(self, golden: Tensor, drafts: Tensor, accepted: Tensor, live: Tensor) -> None:
        """Go on behind the golden token and the `accepted` [n] first drafts; the rest is rewound."""
        ...


class Answered(NamedTuple):
    """Output tokens of one sequence and the steps that made all but the first."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]


def speculate(
    speculator: Speculator, first: Tensor, choice: Choice, outputs_max: Sequence[int], end: int
) -> tuple[Answered, ...]:
    """Answers of S sequences from their first logits [S, V], each until the `end` token or its limit."""
    everyone = torch.arange(len(outputs_max))
    golden = choice.token(first, everyone)
    tokens = [[t] for t in golden.tolist()]
    steps: list[list[Step]] = [[] for _ in tokens]

    def going(i: int) -> bool:
        return tokens[i][-1] != end and len(tokens[i]) < outputs_max[i]

    while live := [i for i in range(len(tokens)) if going(i)]:
        at = torch.tensor(live)
        golden = torch.tensor([tokens[i][-1] for i in live])
        drafts = speculator.draft(golden, at, choice)
        target = speculator.verify(golden, drafts.tokens, at)
        accepted, after = choice.judge(drafts.tokens, drafts.logits, target, at)
        speculator.advance(golden, drafts.tokens, accepted, at)
        outcomes = zip(live, drafts.tokens.tolist(), accepted.tolist(), after.tolist(), strict=True)
        for row, (i, drafted, count, bonus) in enumerate(outcomes):
            step = judged_step(drafted, count, drafts.confidence[row].tolist(), end, outputs_max[i] - len(tokens[i]))
            steps[i].append(step)
            tokens[i] += drafted[: step.accepted] if step.is_cut else [*drafted[: step.accepted], bonus]
    return tuple(Answered(tuple(t), tuple(s)) for t, s in zip(tokens, steps, strict=True))


def judged_step(drafted: Sequence[int], accepted: int, confidence: Sequence[float], end: int, room: int) -> Step:
    """The step whose first `accepted` drafts were right, in an answer that may take `room` more tokens."""
    kept = list(drafted[:accepted])
    last = min(kept.index(end) + 1 if end in kept else accepted + 1, room)
    if last <= accepted:
        return Step(last, last, is_cut=True, confidence=tuple(confidence))
    return Step(accepted, min(accepted + 1, len(drafted)), is_cut=False, confidence=tuple(confidence))


class CachedSpeculator:
    """A Speculator over the caches of a model with its drafter. Prompts are computed by `prefill`, once."""

    def __init__(self, model: Model, questions: Sequence[Question], truncation: Truncation) -> None:
        """Memory for all questions, their answers and one step's drafts. Raises ValueError without a drafter."""
        if model.drafter is None:
            raise ValueError("this model was loaded without its drafter; load it with with_drafter=True")
        self._model, self._questions, self._truncation = model, questions, truncation
        self._size = model.config.text.dspark_block_size
        shape, self._tables, blocks = model.cache_shape(), [], 1
        for question in questions:
            length = len(question.prompt) + question.outputs_max + self._size + 1
            count = blocks_needed(length, shape.block_tokens)
            self._tables.append(range(blocks, blocks + count))
            blocks += count
        self._caches = Caches.allocate(shape, blocks, len(questions) + 1)
        self._ids = [visible_ids(question) for question in questions]
        self._cached = [0] * len(questions)
        self._prefilled: Tensor | None = None

    def prefill(self) -> Tensor:
        """Compute all prompts in chunks of many sequences; logits [S, V] after each prompt's last token."""
        hidden: dict[int, Tensor] = {}
        while waiting := [i for i, q in enumerate(self._questions) if self._cached[i] < len(q.prompt)]:
            room, taken = PREFILL_ROWS, []
            for i in waiting:
                rows = min(room, len(self._questions[i].prompt) - self._cached[i])
                if rows:
                    taken.append((i, self._questions[i].prompt[self._cached[i] : self._cached[i] + rows]))
                room -= rows
            out = self._forward(taken, is_prefill=True)
            for row, (i, tokens) in enumerate(taken):
                self._cached[i] += len(tokens)
                hidden[i] = out[row]
        self._prefilled = self._caches.slots.clone()
        return self._model.logits(torch.stack([hidden[i] for i in range(len(self._questions))]))

    def restart(self) -> None:
        """Forget all answers: the state is that after `prefill` again. Entries need no copy, they are rewritten."""
        assert self._prefilled is not None, "there is nothing to go back to before prefill"
        self._caches.slots.copy_(self._prefilled)
        for i, question in enumerate(self._questions):
            self._cached[i] = len(question.prompt)
            del self._ids[i][len(question.prompt) :]

    @torch.inference_mode()
    def draft(self, golden: Tensor, live: Tensor, choice: Choice) -> Drafts:
        """Proposals out of the drafter's rings."""
        last = torch.tensor([self._cached[i] - 1 for i in live.tolist()])
        block = self._model.draft(golden, last, live + 1, self._caches, lambda row, _: choice.token(row, live))
        return Drafts(block.tokens, block.logits, torch.sigmoid(block.confidence_raw))

    def verify(self, golden: Tensor, drafts: Tensor, live: Tensor) -> Tensor:
        """One decode forward of k + 1 rows a sequence; their rows are written behind what is cached."""
        rows = torch.cat((golden.unsqueeze(1), drafts), dim=1)
        hidden = self._forward([(i, row) for i, row in zip(live.tolist(), rows.tolist(), strict=True)], False)
        return self._model.logits(hidden).view(len(live), self._size + 1, -1)

    def advance(self, golden: Tensor, drafts: Tensor, accepted: Tensor, live: Tensor) -> None:
        """Count the accepted rows as cached."""
        for i, token, row, count in zip(
            live.tolist(), golden.tolist(), drafts.tolist(), accepted.tolist(), strict=True
        ):
            self._ids[i] += [token, *row[:count]]
            self._cached[i] += 1 + count

    def _forward(self, taken: Sequence[tuple[int, Sequence[int]]], is_prefill: bool) -> Tensor:
        """Hidden rows of one step: tokens of some sequences behind what they have cached."""
        ids = [token for _, tokens in taken for token in tokens]
        starts = [self._cached[i] for i, _ in taken]
        masks, rows = [], []
        for i, tokens in taken:
            mask, part = image_part(self._questions[i], self._cached[i], len(tokens))
            masks.append(mask)
            rows += part
        width = self._model.engram.lookback
        batch = Batch(
            token_ids=torch.tensor(ids),
            q_lens=tuple(len(tokens) for _, tokens in taken),
            starts=tuple(starts),
            block_tables=tuple(self._tables[i] for i, _ in taken),
            slots=tuple(i + 1 for i, _ in taken),
            data_lens=tuple(len(self._questions[i].prompt) for i, _ in taken),
            is_prefill=is_prefill,
            lookback=torch.tensor([lookback(self._ids[i], self._cached[i], width) for i, _ in taken]),
            image_mask=torch.cat(masks),
            image_rows=torch.cat(rows) if rows else torch.empty(0, self._model.config.hidden),
        )
        return self._model.forward(batch, self._caches, self._truncation)


def visible_ids(question: Question) -> list[int]:
    """The prompt as Engram looks back on it: image positions hold no token."""
    ids = list(question.prompt)
    for span in question.spans:
        ids[span.start : span.end] = [NO_TOKEN] * span.length
    return ids


def lookback(ids: Sequence[int], start: int, width: int) -> list[int]:
    """The `width` ids before `start`, nearest last; an image hides what is older, and -1 is no token."""
    return padded_lookback(ids[max(0, start - width) : start], width)


def image_part(question: Question, start: int, count: int) -> tuple[Tensor, list[Tensor]]:
    """The image mask bool [count] and image rows of the positions from `start` on."""
    mask, rows = torch.zeros(count, dtype=torch.bool), []
    for span, embedded in zip(question.spans, question.rows, strict=True):
        first, last = max(start, span.start), min(start + count, span.end)
        if first < last:
            mask[first - start : last - start] = True
            rows.append(embedded[first - span.start : last - span.start])
    return mask, rows
