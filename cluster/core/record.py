"""What a request machine writes down as it goes: the effects of an event, calls in flight, its story, its alarm."""

from shoal.cluster.core.asks import Ask, Asks, Undo
from shoal.cluster.core.attempt import Attempt
from shoal.cluster.core.job import Job
from shoal.cluster.core.messages import Abort, Effect, WakeAt
from shoal.cluster.core.patience import Patience
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.core.timeline import Mark, RequestTimeline


class Record:
    """The book-keeping half of a request machine; decides nothing."""

    def __init__(self, job: Job, policy: RequestPolicy) -> None:
        self._of = job
        self._attempt = Attempt(0, job.request_id)
        self._patience = Patience(policy)
        self._asks = Asks()
        self._wake_us = 0
        self._marks: list[Mark] = []
        self._effects: list[Effect] = []
        self._now_us = 0

    def timeline(self) -> RequestTimeline:
        """What has happened so far."""
        return RequestTimeline(self._of.request_id, len(self._of.token_ids), tuple(self._marks))

    def _ask(self, kind: str, limit_us: int, undo: Undo | None, image_index: int = -1) -> int:
        """Number of a new call; what it makes a peer hold is undone when the attempt is given up."""
        group = undo.group if isinstance(undo, Abort) else None
        ask = Ask(self._asks.next_number(), kind, self._now_us + limit_us, group, image_index)
        self._asks.open(ask, undo)
        if undo is not None:
            self._attempt.undos.append(undo)
        return ask.number

    def _set_wake(self) -> None:
        if (wake_us := self._patience.next_us(*self._asks.due_us())) and wake_us != self._wake_us:
            self._wake_us = wake_us
            self._effects.append(WakeAt(wake_us))

    def _mark(self, what: str, **detail: int | float | str) -> None:
        self._marks.append(Mark(self._now_us, what, self._attempt.number, tuple(detail.items())))
