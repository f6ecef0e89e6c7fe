"""Drafting and verifying over real caches gives the engine's answers; a known drafter gives known steps."""

import dataclasses
from collections.abc import Sequence

import torch
from shoal.engines.toy.evaluate.choice import Greedy, Sampled
from shoal.engines.toy.evaluate.drafting import (
    CachedSpeculator,
    Drafts,
    image_part,
    lookback,
    speculate,
    visible_ids,
)
from shoal.engines.toy.evaluate.papers import paper
from shoal.engines.toy.evaluate.room import Room
from shoal.engines.toy.evaluate.sitting import TRUNCATION, Question, sit
from shoal.engines.toy.tasks.mixture import examination_random
from torch import Tensor

from tests.engines.toy.evaluate.random_text import text

NO_END = -7
DRAFTED, PLAIN_TOKEN = 5, 300


class Oracle:
    """A Speculator whose model says 0, 1, 2, … and whose drafter is right `lengths` times in turn, then wrong."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        self.advanced: list[int] = []

    def draft(self, golden: Tensor, live: Tensor, choice: object) -> Drafts:
        right = self.lengths.pop(0)
        tokens = golden.unsqueeze(1) + torch.arange(1, 6)
        tokens[:, right:] = 99
        return Drafts(tokens, torch.zeros(len(golden), 5, 100), torch.full((len(golden), 5), 0.5))

    def verify(self, golden: Tensor, drafts: Tensor, live: Tensor) -> Tensor:
        rows = torch.cat((golden.unsqueeze(1), drafts), dim=1)
        return torch.nn.functional.one_hot((rows + 1) % 100, 100).float()

    def advance(self, golden: Tensor, drafts: Tensor, accepted: Tensor, live: Tensor) -> None:
        self.advanced += accepted.tolist()


def test_known_drafts_give_known_steps():
    oracle = Oracle([3, 0, 5, 2])
    first = torch.nn.functional.one_hot(torch.tensor([0]), 100).float()
    answered = speculate(oracle, first, Greedy(), [14], NO_END)[0]
    assert answered.tokens == tuple(range(14))
    assert [(s.accepted, s.verified, s.is_cut) for s in answered.steps] == [
        (3, 4, False),
        (0, 1, False),
        (5, 5, False),
        (2, 2, True),
    ]
    assert oracle.advanced == [3, 0, 5, 2]


def test_an_answer_stops_at_its_end_token_wherever_a_step_meets_it():
    first = torch.nn.functional.one_hot(torch.tensor([0]), 100).float()
    inside = speculate(Oracle([5, 5]), first, Greedy(), [50], end=3)[0]
    assert inside.tokens == (0, 1, 2, 3)
    assert [(s.accepted, s.is_cut) for s in inside.steps] == [(3, True)]
    as_bonus = speculate(Oracle([2]), first, Greedy(), [50], end=3)[0]
    assert as_bonus.tokens == (0, 1, 2, 3)
    assert [(s.accepted, s.is_cut) for s in as_bonus.steps] == [(2, False)]
    at_once = speculate(Oracle([]), first, Greedy(), [50], end=0)[0]
    assert (at_once.tokens, at_once.steps) == ((0,), ())


class Known:
    """A speculator's caches, with drafts out of known answers: `right` of them, then wrong ones."""

    def __init__(self, inner: CachedSpeculator, answers: Sequence[tuple[int, ...]], right: int) -> None:
        self._inner, self._right = inner, right
        self._left = [list(answer[1:]) for answer in answers]

    def draft(self, golden: Tensor, live: Tensor, choice: object) -> Drafts:
        tokens = torch.tensor([self._next(self._left[i]) for i in live.tolist()])
        return Drafts(tokens, torch.zeros(*tokens.shape, 1), torch.full(tokens.shape, 0.5))

    def _next(self, left: list[int]) -> list[int]:
        wrong = [token ^ 1 for token in left[self._right : DRAFTED]]
        return (left[: self._right] + wrong + [PLAIN_TOKEN] * DRAFTED)[:DRAFTED]

    def verify(self, golden: Tensor, drafts: Tensor, live: Tensor) -> Tensor:
        return self._inner.verify(golden, drafts, live)

    def advance(self, golden: Tensor, drafts: Tensor, accepted: Tensor, live: Tensor) -> None:
        self._inner.advance(golden, drafts, accepted, live)
        for i, count in zip(live.tolist(), accepted.tolist(), strict=True):
            del self._left[i][: count + 1]


def test_drafting_answers_as_the_engine_does(room: Room):
    """Rejected rows are rewound in rings, accumulators and entries: the tokens are those of an engine without drafts.

    Prompts of odd and even length, one of them longer than the rings and truncated, and one with a picture; drafts of
    the drafter itself, and drafts that are right none, two or all of the time.
    """
    samples = [
        paper("pictures").generate(examination_random(3, 0)),
        paper("copying").generate(examination_random(3, 0)),
    ]
    limited = [dataclasses.replace(question, outputs_max=9) for question in room.questions(samples)]
    questions = [text(1, 31, 9), text(2, 200, 9), *limited]
    end, most = room.model.config.eos_token_id, [9] * len(questions)
    engine = sit(dataclasses.replace(room.model, drafter=None), questions)
    assert max(map(len, engine)) == 9
    speculator = CachedSpeculator(room.model, questions, TRUNCATION)
    first = speculator.prefill()
    own = speculate(speculator, first, Greedy(), most, end)
    assert [a.tokens for a in own] == list(engine)
    for right in (0, 2, DRAFTED):
        speculator.restart()
        answered = speculate(Known(speculator, engine, right), first, Greedy(), most, end)
        assert [a.tokens for a in answered] == list(engine)
        accepted = [step.accepted for a in answered for step in a.steps if not step.is_cut]
        assert accepted == [right] * len(accepted)
    speculator.restart()
    assert speculate(speculator, first, Greedy(), most, end) == own


def test_sampled_answers_follow_their_seed(room: Room):
    speculator = CachedSpeculator(room.model, [text(4, 40, 5), text(5, 50, 5)], TRUNCATION)
    first, end = speculator.prefill(), room.model.config.eos_token_id

    def sampled(seed: int) -> tuple[tuple[int, ...], ...]:
        choice = Sampled([(seed, 0), (seed, 1)])
        answered = speculate(speculator, first, choice, [5, 5], end)
        speculator.restart()
        return tuple(a.tokens for a in answered)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_greedy_choices_out_of_a_block_are_the_drafters_own(room: Room):
    speculator = CachedSpeculator(room.model, [text(6, 60, 8), text(7, 33, 8)], TRUNCATION)
    golden = speculator.prefill().argmax(-1)
    block = room.model.draft(golden, torch.tensor([59, 32]), torch.tensor([1, 2]), speculator._caches)
    drafts = speculator.draft(golden, torch.arange(2), Greedy())
    assert torch.equal(drafts.tokens, block.tokens)
    assert torch.allclose(drafts.logits, block.logits, atol=1e-5)
    assert torch.allclose(drafts.confidence.float(), torch.sigmoid(block.confidence_raw), atol=1e-5)


def test_an_image_hides_what_engram_would_see_before_it(room: Room):
    assert lookback([5, 6, 7, 8], 4, 3) == [6, 7, 8]
    assert lookback([5, -1, 7, 8], 4, 3) == [-1, 7, 8]
    assert lookback([5, 6], 2, 3) == [-1, 5, 6]
    assert lookback([5, 6, -1], 3, 3) == [-1, -1, -1]
    sample = paper("pictures").generate(examination_random(3, 1))
    question: Question = room.questions([sample])[0]
    ids = visible_ids(question)
    hidden = [i for i, token in enumerate(ids) if token == -1]
    assert hidden == [i for span in question.spans for i in range(span.start, span.end)]
    start, count = question.spans[0].start - 2, question.spans[0].length
    mask, rows = image_part(question, start, count)
    assert mask.tolist() == [False, False] + [True] * (count - 2)
    assert torch.equal(rows[0], question.rows[0][:-2])
