"""What is asked: one paper for each kind of question, and how many of its questions a default examination has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.tasks import arithmetic, chat, copying, lexicon, pictures, recall, schema, tools
from shoal.engines.toy.tasks.sample import Sample

DRAFTS = "drafts"
LOSS_PERCENT = 50
"""Questions of a paper asked again with a loss, for each 100 of its own."""
DRAFT_PERCENT = 16
"""Questions answered with drafts, for each 100 of `--samples`, in every paper of the mixture."""


@dataclass(frozen=True, slots=True)
class Paper:
    """Questions of one task and setting.

    `percent`: questions for each 100 of `--samples`, fewer where one takes long; `batch`: how many are answered
    together; `is_mixed`: part of the mixture that drafts are measured on; `losses`: kinds whose loss it is asked under.
    """

    name: str
    task: str
    generate: Callable[[Random], Sample]
    percent: int = 100
    batch: int = 16
    is_mixed: bool = True
    losses: tuple[Loss, ...] = ()

    def count(self, samples: int) -> int:
        """Questions of this paper in an examination of `samples`."""
        return max(1, round(samples * self.percent / 100))


def _recall(tokens: int, turns: int, percent: int, batch: int, losses: tuple[Loss, ...] = ()) -> Paper:
    turn = "first" if turns == 1 else "second"
    generate = partial(recall.generate, tokens=tokens, needles=NEEDLES[tokens], turns=turns)
    return Paper(f"recall-{tokens}-{turn}", "recall", generate, percent, batch, tokens <= 512, losses)


NEEDLES = {512: 4, 2048: 8, 4000: 8}
"""Codes planted in a text, by its length in tokens. One is asked in each turn, and the last answer is judged."""
PAPERS: tuple[Paper, ...] = (
    _recall(512, 1, 40, 8),
    _recall(512, 2, 40, 8),
    _recall(2048, 1, 28, 4, (Loss.MAIN, Loss.INDEX)),
    _recall(2048, 2, 28, 4),
    _recall(4000, 1, 16, 2),
    _recall(4000, 2, 16, 2),
    Paper("copying", "copying", copying.generate, losses=(Loss.WINDOW,)),
    Paper("lexicon", "lexicon", lexicon.generate, losses=(Loss.ENGRAM,)),
    Paper("schema", "schema", schema.generate),
    Paper("tools", "tools", tools.generate),
    Paper("arithmetic", "arithmetic", partial(arithmetic.generate, held_out=True)),
    Paper("pictures", "pictures", pictures.generate, losses=(Loss.IMAGES,)),
    Paper("chat", "chat", chat.generate),
)


def names() -> tuple[str, ...]:
    """Everything that `--only` may name: tasks, then papers that are part of one, then drafts."""
    tasks = tuple(dict.fromkeys(paper.task for paper in PAPERS))
    return (*tasks, *(paper.name for paper in PAPERS if paper.name not in tasks), DRAFTS)


def chosen(only: Iterable[str]) -> tuple[Paper, ...]:
    """The papers of named tasks or papers, all of them when none is named; `drafts` names no paper."""
    wanted = set(only) - {DRAFTS}
    return tuple(paper for paper in PAPERS if not wanted or paper.name in wanted or paper.task in wanted)


def paper(name: str) -> Paper:
    """A paper by its name."""
    return next(paper for paper in PAPERS if paper.name == name)
