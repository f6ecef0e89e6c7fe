"""From outcomes of jobs to the figures of an examination."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.engines.toy.evaluate import goals
from shoal.engines.toy.evaluate.acceptance import Acceptance, summarise
from shoal.engines.toy.evaluate.drafting import Answered
from shoal.engines.toy.evaluate.goals import GREEDY, SAMPLED
from shoal.engines.toy.evaluate.intervals import Share
from shoal.engines.toy.evaluate.jobs import Attempt, Outcome
from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.evaluate.papers import PAPERS


@dataclass(frozen=True, slots=True)
class PaperResult:
    """How a paper was answered by the intact engine."""

    paper: str
    right: Share
    valid: Share


@dataclass(frozen=True, slots=True)
class LossResult:
    """The same questions of a paper with everything intact and with one kind lost; `changed`: outputs that differ."""

    loss: Loss
    paper: str
    intact: Share
    lost: Share
    changed: Share

    @property
    def drop(self) -> float:
        """Accuracy that the loss costs, 0.3 being 30 points."""
        return self.intact.value - self.lost.value


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Drafts under one choice of tokens: over the whole mixture, and accepted length of each paper.

    `same`: greedy answers that equal, token by token, the engine's without drafts; none of other choices.
    """

    choice: str
    acceptance: Acceptance
    lengths: tuple[tuple[str, float], ...]
    same: Share


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures, papers in their order."""

    papers: tuple[PaperResult, ...]
    losses: tuple[LossResult, ...]
    drafts: tuple[DraftResult, ...]

    @property
    def marks(self) -> tuple[goals.Mark, ...]:
        """The goals that these figures speak about."""
        found = {goals.accuracy_key(p.paper): p.right.value for p in self.papers}
        found |= {goals.validity_key(p.paper): p.valid.value for p in self.papers}
        found |= {goals.drop_key(item.loss): item.drop for item in self.losses}
        found |= {goals.length_key(d.choice): d.acceptance.length for d in self.drafts}
        found |= {goals.calibration_key(d.choice): d.acceptance.calibration_error for d in self.drafts}
        return goals.marks(found)


def summary_of(outcomes: Iterable[Outcome], drafts_count: int) -> Summary:
    """The figures of finished jobs; `drafts_count` is how many drafts a step verifies."""
    attempts: dict[tuple[str, Loss | None], dict[int, Attempt]] = defaultdict(dict)
    drafted: dict[str, dict[str, dict[int, Answered]]] = {GREEDY: defaultdict(dict), SAMPLED: defaultdict(dict)}
    for outcome in outcomes:
        job = outcome.job
        attempts[job.paper, job.loss] |= {attempt.index: attempt for attempt in outcome.attempts}
        if job.is_drafting:
            drafted[GREEDY][job.paper] |= dict(zip(job.indices, outcome.greedy, strict=True))
            drafted[SAMPLED][job.paper] |= dict(zip(job.indices, outcome.sampled, strict=True))
    order = [paper.name for paper in PAPERS]
    papers = [_paper(name, attempts[name, None]) for name in order if attempts.get((name, None))]
    losses = [
        _loss(name, loss, attempts[name, None], attempts[name, loss])
        for loss in Loss
        for name in order
        if attempts.get((name, loss))
    ]
    pairs = [
        (answer.tokens, attempts[name, None][i].output)
        for name, answers in drafted[GREEDY].items()
        for i, answer in answers.items()
        if i in attempts[name, None]
    ]
    same = {GREEDY: _share([ours == engines for ours, engines in pairs]), SAMPLED: Share(0, 0)}
    drafts = [_draft(choice, found, drafts_count, same[choice]) for choice, found in drafted.items() if found]
    return Summary(tuple(papers), tuple(losses), tuple(drafts))


def _paper(name: str, attempts: dict[int, Attempt]) -> PaperResult:
    return PaperResult(
        name, _share([a.is_right for a in attempts.values()]), _share([a.is_valid for a in attempts.values()])
    )


def _loss(name: str, loss: Loss, intact: dict[int, Attempt], lost: dict[int, Attempt]) -> LossResult:
    return LossResult(
        loss,
        name,
        intact=_share([intact[i].is_right for i in lost]),
        lost=_share([attempt.is_right for attempt in lost.values()]),
        changed=_share([attempt.output != intact[i].output for i, attempt in lost.items()]),
    )


def _draft(choice: str, by_paper: dict[str, dict[int, Answered]], drafts_count: int, same: Share) -> DraftResult:
    steps = {p.name: [a.steps for a in by_paper[p.name].values()] for p in PAPERS if p.name in by_paper}
    lengths = [(name, summarise(answers, drafts_count).length) for name, answers in steps.items()]
    everything = [answer for answers in steps.values() for answer in answers]
    return DraftResult(choice, summarise(everything, drafts_count), tuple(lengths), same)


def _share(flags: Sequence[bool]) -> Share:
    return Share(sum(flags), len(flags))
