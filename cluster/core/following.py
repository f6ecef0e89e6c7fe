"""Life of an answer that begins from another one's prompt: it waits for that fork, or is computed by itself."""

from shoal.balancers.reports import Choice
from shoal.cluster.core import messages as m
from shoal.cluster.core.attempt import Attempt
from shoal.cluster.core.entrypoint import RequestMachine
from shoal.cluster.core.job import Job
from shoal.cluster.core.names import FIRST_ATTEMPT, engine_id
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.core.prompt_scored import ScoreBoard
from shoal.cluster.core.state import State


class FollowerMachine(RequestMachine):
    """A RequestMachine whose first attempt is begun by the engine that computed its leader's prompt.

    Until then it asks for nothing. When the engine cannot, or the leader is gone, it starts as any request; so it
    does if the engine that forked it is lost. What it answers is the same either way.
    """

    def __init__(self, job: Job, policy: RequestPolicy) -> None:
        super().__init__(job, policy)
        self._attempt = Attempt(FIRST_ATTEMPT, job.request_id)  # the engine's; what it starts by itself comes after
        self._waits = True
        self._until_us = 0

    def on(self, event: m.Event, now_us: int) -> tuple[m.Effect, ...]:
        """Take one event; returns the effects to perform, in order."""
        if not self._waits:
            return self._begun(event, now_us)
        match event:
            case m.Begin():
                limit_us = now_us + self._policy.deadline_us
                self._until_us = min(self._job.deadline_us or limit_us, limit_us)
                if self._until_us > now_us:
                    return (m.WakeAt(self._until_us),)
            case m.Forked():
                return self._adopt(event, now_us)
            case m.ClientGone():
                self._waits = False
                return super().on(event, now_us)
            case m.NotForked() | m.LeaderGone():
                pass
            case m.Tick() if now_us >= self._until_us:
                pass
            case _:
                return ()
        self._waits = False
        return super().on(m.Begin(), now_us)

    def _adopt(self, forked: m.Forked, now_us: int) -> tuple[m.Effect, ...]:
        """The sequence at that engine is this request's attempt: all of its prompt was computed for another one."""
        self._waits = False
        self._now_us, self._effects = now_us, []
        self._patience.begin(self._job.deadline_us, now_us)
        self._attempt = attempt = Attempt(forked.attempt, self._job.request_id)
        attempt.decode = Choice(forked.group, attempt.sequence, 0, 0.0)
        attempt.undos.append(m.Abort(forked.group, attempt.sequence, ""))
        self._cached_tokens = len(self._job.token_ids)
        self._scores = ScoreBoard(len(self._job.token_ids), is_wanted=False)  # the leader has them
        self._state = State.DECODING
        self._patience.at_engine(now_us)
        self._mark("arrived", tokens=len(self._job.token_ids), images=len(self._job.images))
        self._mark("forked", group=forked.group.name)
        self._set_wake()
        return tuple(self._effects)

    def _begun(self, event: m.Event, now_us: int) -> tuple[m.Effect, ...]:
        """As any request; a fork that comes too late is given back, unless it is the one that runs."""
        match event:
            case m.NotForked() | m.LeaderGone():
                return ()
            case m.Forked(attempt, group):
                if attempt == self.attempt and group in self._attempt.groups():
                    return ()
                return (m.Abort(group, engine_id(self._job.request_id, attempt), "begun too late"),)
        return super().on(event, now_us)
