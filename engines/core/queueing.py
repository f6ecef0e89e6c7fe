"""In which order waiting prompts are considered: priority, deadline, users' shares, and nobody overtaken for ever."""

from collections.abc import Iterable, Iterator

from shoal.engines.core.ledger import Ledger
from shoal.engines.core.request import FinishReason
from shoal.engines.core.sequence import Sequence

NEVER_DUE = 1 << 62


def in_order(ledger: Ledger) -> Iterable[Sequence]:
    """The waiting queue as a prefill step walks it: as it stands, unless requests differ in what they ask for.

    Then: prompts that own memory, prompts overtaken too often, and the rest by priority (greater first), deadline
    (earlier first) and user. Users take turns by tokens (start-time fair queueing): a prompt's tag is what its user
    was served so far, plus that user's prompts before it. Ties, and prompts of one user alike, keep their order.
    """
    waiting = ledger.waiting
    if not ledger.rules.younger_may_pass or not _differ(waiting):
        return waiting
    tags: dict[str, int] = {}
    keyed = []
    for sequence in waiting:
        request = sequence.request
        tag = tags.get(request.user, ledger.served.get(request.user, 0))
        if not sequence.holds_memory:  # its tokens are charged already
            tags[request.user] = tag + sequence.len
        if sequence.holds_memory or is_due(ledger, sequence):
            key = (0 if sequence.holds_memory else 1, 0, 0, 0)
        else:
            key = (2, -request.priority, request.deadline_us or NEVER_DUE, tag)
        keyed.append((key, sequence))
    keyed.sort(key=lambda pair: pair[0])
    return [sequence for _, sequence in keyed]


def is_due(ledger: Ledger, sequence: Sequence) -> bool:
    """Whether a prompt was overtaken so often that no new one may pass it any more."""
    return sequence.overtaken >= ledger.rules.overtaken_max


def count_overtaken(waiting: Iterable[Sequence], admitted: Iterable[Sequence]) -> None:
    """After a plan gave memory to `admitted` prompts: count it for every older one that could have run instead."""
    youngest = max((sequence.arrival for sequence in admitted), default=-1)
    if youngest < 0:
        return
    for sequence in waiting:
        if sequence.arrival < youngest and sequence.is_schedulable and not sequence.holds_memory:
            sequence.overtaken += 1


def expire(ledger: Ledger, now_us: int) -> None:
    """End prompts of which nothing is computed and whose deadline has passed: nobody waits for their answer."""
    for sequence in _late(ledger.waiting, now_us):
        deadline = sequence.request.deadline_us
        sequence.finish(
            FinishReason.ERROR,
            f"deadline_us = {deadline} passed before it was computed (now {now_us}): retry at lower load",
        )


def _late(waiting: Iterable[Sequence], now_us: int) -> Iterator[Sequence]:
    return (s for s in waiting if 0 < s.request.deadline_us < now_us and not s.is_finished and not s.holds_memory)


def _differ(waiting: Iterable[Sequence]) -> bool:
    first: str | None = None
    for sequence in waiting:
        request = sequence.request
        if first is None:
            first = request.user
        if request.priority or request.deadline_us or request.user != first:
            return True
    return False
