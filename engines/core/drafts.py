"""Draft tokens of running sequences: places for their draft info, and who decides how many are verified."""

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Protocol

import numpy as np
from shoal.engines.core.sequence import Sequence


class VerifyChooser(Protocol):
    """Chooses how many rows each sequence of a decode step gets."""

    def choose(self, sequences: Seq[Sequence]) -> Seq[int]:
        """Rows of each sequence, in the order given (the batch order): 1..1 + drafts, one of them the last token.

        Called once a decode step with at least one sequence, before their counters move on: `process_count ==
        schedule_count` tells that no step of a sequence is open. Fields of the sequences are only read.
        """
        ...


def accept_rates(confidences: Seq[Seq[float]]) -> list[tuple[float, ...]]:
    """Running products of each sequence's confidences, in double precision; rows are equally long or empty."""
    told = [row for row in confidences if row]
    if not told:
        return [()] * len(confidences)
    flat = np.fromiter(chain.from_iterable(told), np.float64)
    products = map(tuple, flat.reshape(len(told), -1).cumprod(axis=1).tolist())
    return [next(products) if row else () for row in confidences]


def hold_drafts(sequence: Sequence, made: Seq[int], rates: tuple[float, ...], pads: tuple[int, ...]) -> None:
    """Take over the drafts that a step made for a sequence, pads if it made none (engine runtime notes 1.5)."""
    sequence.drafts = tuple(made) if made else pads
    sequence.has_draft_info = bool(made)
    sequence.prev_accept_rates, sequence.accept_rates = sequence.accept_rates, rates


class DraftSlots:
    """Ids 1..count of places for draft info, the lowest free one first; 0 is no place. Each has one owner."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(1, count + 1))  # a heap

    def take(self) -> int:
        """The lowest free id; there is one for every sequence that may run."""
        assert self._free, f"all {self.count} draft slots are taken"
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free an id that was taken."""
        heapq.heappush(self._free, slot)

    def check(self, owners: Iterable[int]) -> None:
        """Assert that `owners` are exactly the ids taken, each once."""
        everyone = sorted([*owners, *self._free])
        assert everyone == list(range(1, self.count + 1)), f"draft slots taken and free: {everyone} of {self.count}"
