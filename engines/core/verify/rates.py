"""Which acceptance rates decide how many drafts are verified, and which decide whose they are."""

from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from shoal.engines.core.verify.curve import Floats

NO_DRAFT = -1.0  # below every rate: a place where a sequence holds no draft


class Drafted(Protocol):
    """The fields of a sequence that are read here; `engines/core/sequence.py` says what they mean."""

    @property
    def drafts(self) -> Seq[int]:
        """Drafts held."""
        ...

    @property
    def has_draft_info(self) -> bool:
        """Whether they were made by the drafter and not yet planned."""
        ...

    @property
    def accept_rates(self) -> Seq[float]:
        """Running products of their confidences."""
        ...

    @property
    def prev_accept_rates(self) -> Seq[float]:
        """Those of the drafts before."""
        ...

    @property
    def schedule_count(self) -> int:
        """Steps planned."""
        ...

    @property
    def process_count(self) -> int:
        """Steps committed."""
        ...


class RateQueues(NamedTuple):
    """Rates [sequences, drafts] in batch order; a row never rises, NO_DRAFT where a sequence holds fewer drafts.

    `size` decides the total, `split` who gets it. They are the same array where every sequence has a step open.
    """

    size: Floats
    split: Floats


def rate_queues(sequences: Seq[Drafted], drafts: int) -> RateQueues:
    """The rates of both decisions (engine runtime notes 7.3); `drafts` is the most a sequence holds.

    The total must not depend on the confidences that decide who gets it, so it comes from one step earlier than the
    split: from `prev_accept_rates` if a sequence has no step open, for its latest rates are the newest there are.
    Raises ValueError for rates that are not one a draft.
    """
    size: list[Seq[float]] = []
    split: list[Seq[float]] = []
    is_same = True
    for one in sequences:
        held = len(one.drafts)
        latest = one.accept_rates
        if one.process_count == one.schedule_count:
            earlier = one.prev_accept_rates
            is_same = is_same and earlier is latest
            default = 1.0 if one.has_draft_info else 0.0
        else:
            earlier, default = latest, 1.0
        size.append(earlier if len(earlier) == held == drafts else _padded(earlier, held, drafts, default))
        split.append(latest if len(latest) == held == drafts else _padded(latest, held, drafts, default))
    size_rates = _array(size, drafts)
    return RateQueues(size_rates, size_rates if is_same else _array(split, drafts))


def _array(rows: list[Seq[float]], drafts: int) -> Floats:
    """Equally long rows as one array: a third of the time that numpy takes for nested ones."""
    return np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * drafts).reshape(len(rows), drafts)


def _padded(rates: Seq[float], held: int, drafts: int, default: float) -> list[float]:
    """One rate a held draft, `default` where there are none yet, then NO_DRAFT."""
    if (rates and len(rates) != held) or held > drafts:
        raise ValueError(f"{len(rates)} rates for {held} drafts of at most {drafts}: need one a draft, or none at all")
    return [*(rates or [default] * held), *[NO_DRAFT] * (drafts - held)]
