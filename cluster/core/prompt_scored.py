"""Scores of a prompt's tokens over all attempts: each position once, complete or not."""

from dataclasses import dataclass

from shoal.balancers.reports import GroupRef
from shoal.engines.core.request import PromptScore


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Event of a request machine: scores of consecutive prompt tokens from position `first`, perhaps again."""

    attempt: int
    group: GroupRef
    first: int
    scores: tuple[PromptScore, ...]


@dataclass(frozen=True, slots=True)
class EmitScores:
    """Effect of a request machine: scores for the client of all prompt tokens but the first, once."""

    scores: tuple[PromptScore, ...]


class ScoreBoard:
    """What is known of one request's prompt; complete from the start where nobody asked."""

    def __init__(self, prompt_len: int, is_wanted: bool) -> None:
        self._prompt_len = prompt_len if is_wanted else 1
        self._scores: dict[int, PromptScore] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return len(self._scores) == self._prompt_len - 1

    def take(self, first: int, scores: tuple[PromptScore, ...]) -> tuple[PromptScore, ...]:
        """Keep scores of positions that had none; all of them in order when these were the last, else ()."""
        if self.is_complete:
            return ()
        for position, score in enumerate(scores, first):
            if 0 < position < self._prompt_len:
                self._scores.setdefault(position, score)
        return tuple(self._scores[p] for p in range(1, self._prompt_len)) if self.is_complete else ()
