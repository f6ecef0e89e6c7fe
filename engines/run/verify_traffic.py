"""Seeded traffic of drafted sequences: how likely each draft is to be accepted, what the drafter says, what happens."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from shoal.engines.run.published import DRAFTS

Floats = NDArray[np.float64]

# Chance that a draft is accepted once those before it were: logistic(EASE + request + step + draft), independent
# normal deviations of these widths. Fitted, with the curve of `published.py` and nothing else: to 3.30 tokens a step
# of five drafts, and to the published lengths and gains at 32, 60 and 96 sequences. Requests must differ that much:
# with one chance for all, shorter lengths would lose more than was published.
EASE, REQUEST_WIDTH, STEP_WIDTH, DRAFT_WIDTH = 1.79, 0.7, 0.7, 2.0
# Widths are in logits too: an error of about 0.01 in the chance, as is reported of the calibrated confidence head.
CONFIDENCE_WIDTH = 0.08
# A request ends after 446 tokens on average; its successor comes without drafts of its own.
END_CHANCE = 3.3 / 446


@dataclass(slots=True)
class Held:
    """The drafts of one sequence as a chooser reads them; nothing of it is open while a step is chosen."""

    drafts: tuple[int, ...] = (0,) * DRAFTS
    has_draft_info: bool = False
    accept_rates: tuple[float, ...] = ()
    prev_accept_rates: tuple[float, ...] = ()
    schedule_count: int = 0
    process_count: int = 0


@dataclass
class Traffic:
    """`count` sequences in decode; `held` is what a chooser sees, and `advance` makes the next step's drafts."""

    count: int
    seed: int
    held: list[Held] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the first requests; they come from a prefill, so their first drafts are pads."""
        self._random = np.random.default_rng(self.seed)
        self._request = self._random.normal(0.0, REQUEST_WIDTH, (self.count, 1))
        self.held = [Held() for _ in range(self.count)]
        self.passed = np.zeros(self.count, np.int64)

    def tokens(self, rows: NDArray[np.integer] | list[int]) -> int:
        """Tokens of the step if `rows` [count] are verified: one each, and the accepted drafts among them."""
        return self.count + int(np.minimum(self.passed, np.asarray(rows) - 1).sum())

    def advance(self) -> None:
        """A step is over: some requests end and others take their place, and all have new drafts.

        `passed` [count] is how many of a sequence's next drafts would be accepted if all were verified.
        """
        shape = (self.count, DRAFTS)
        ended = self._random.random(self.count) < END_CHANCE
        self._request[ended] = self._random.normal(0.0, REQUEST_WIDTH, (int(ended.sum()), 1))
        step = self._random.normal(0.0, STEP_WIDTH, (self.count, 1))
        logit = EASE + self._request + step + self._random.normal(0.0, DRAFT_WIDTH, shape)
        chance = 1 / (1 + np.exp(-logit))
        stated = 1 / (1 + np.exp(-(logit + self._random.normal(0.0, CONFIDENCE_WIDTH, shape))))
        passes = self._random.random(shape) < chance
        self.passed = np.where(ended, 0, np.multiply.accumulate(passes, axis=1).sum(axis=1))
        rates = np.multiply.accumulate(stated, axis=1).tolist()
        for one, is_new, latest in zip(self.held, ended.tolist(), rates, strict=True):
            if is_new:
                one.has_draft_info, one.prev_accept_rates, one.accept_rates = False, (), ()
            else:
                one.has_draft_info, one.prev_accept_rates, one.accept_rates = True, one.accept_rates, tuple(latest)
