"""The cluster behind the HTTP side: one request machine a request, its effects performed over Ray, letters routed back.

Owned by the asyncio loop of one Ray Serve replica. All decisions are in the machine; here calls are made, awaited with
a deadline, and their answers fed back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from ray.exceptions import ActorDiedError, RayError
from shoal.balancers.reports import GroupRef
from shoal.cluster.api.errors import (
    DeadlineExceededError,
    EngineError,
    FullError,
    PromptTooLongError,
    ServiceError,
    UnavailableError,
)
from shoal.cluster.api.jobs import ChatJob, TokenBatch
from shoal.cluster.core import messages as m
from shoal.cluster.core.membership import View
from shoal.cluster.core.timeline import RequestTimeline
from shoal.cluster.live.metrics import ask_counters, counters_text
from shoal.cluster.live.names import (
    COMPLETION,
    DECODE_BALANCER,
    ENCODER,
    ENGINE_ROLES,
    INDEX,
    NORMAL,
    PREFILL_BALANCER,
    PROMPT,
    role_of,
)
from shoal.cluster.live.request import RequestRun
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import RAY, Surroundings
from shoal.cluster.live.tasks import Tasks

log = logging.getLogger(__name__)

POLL_WAIT_S = 0.5
POLL_DEADLINE_S = 10.0
POLL_RETRY_S = 0.2
TIMELINES_MAX = 512
LINGER_S = 5


class EntrypointService:
    """A `ChatService` over the live cluster."""

    def __init__(self, spec: ClusterSpec, name: str, eos_token_id: int, place: Surroundings = RAY) -> None:
        """`name` is this replica's own, in letters and outboxes; a new replica has a new one."""
        self.spec = spec
        self.name = name
        self._eos_token_id = eos_token_id
        self.put = place.put
        self.directory = place.members(spec.name, self._on_view)
        self.tasks = Tasks(place.end)
        self._runs: dict[str, RequestRun] = {}
        self._alive: frozenset[GroupRef] = frozenset()
        self._timelines: dict[str, RequestTimeline] = {}

    def start(self) -> None:
        """Follow the directory; called once on the loop that serves requests."""
        self.tasks.spawn_vital(self.directory.follow())

    @property
    def models(self) -> Sequence[str]:
        """The served name."""
        return (self.spec.cluster.model.name,)

    def ready(self) -> bool:
        """Whether every role that a request passes has a ready member."""
        view, cluster = self.directory.view, self.spec.cluster
        roles = [PREFILL_BALANCER, NORMAL] if cluster.is_normal else [PREFILL_BALANCER, DECODE_BALANCER]
        roles += [] if cluster.is_normal else [PROMPT, COMPLETION]
        roles += [INDEX] if cluster.store else []
        roles += [ENCODER] if cluster.encoders else []
        return all(view.ready(role) for role in roles)

    async def metrics_text(self) -> str:
        """Gauges of this replica's view of the cluster, and counters of its engines."""
        lines = ["# TYPE shoal_members gauge"]
        counts: dict[tuple[str, str], int] = {}
        for member in self.directory.view.members:
            counts[member.role, member.state] = counts.get((member.role, member.state), 0) + 1
        lines += [f'shoal_members{{role="{r}",state="{s}"}} {n}' for (r, s), n in sorted(counts.items())]
        lines += ["# TYPE shoal_requests_open gauge", f"shoal_requests_open {len(self._runs)}"]
        engines = [g for role in ENGINE_ROLES for g in self.directory.view.ready(role)]
        handles = {g.name: handle for g in engines if (handle := self.directory.handle(g)) is not None}
        counters = counters_text(self.spec.cluster.model.name, await ask_counters(handles))
        return "\n".join(lines) + "\n" + counters

    async def submit(self, job: ChatJob) -> AsyncGenerator[TokenBatch, None]:
        """Serve one sequence; closing the iterator aborts it everywhere."""
        run = RequestRun(self, job, self._eos_token_id)
        self._runs[job.request_id] = run
        try:
            run.feed(m.Begin())
            if job.leader and not self._is_open(job.leader):
                run.feed(m.LeaderGone())
            while True:
                batch = await run.batches.get()
                if isinstance(batch, m.Failure):
                    raise service_error(batch)
                yield batch
                if batch.finish_reason is not None:
                    return
        finally:
            run.feed(m.ClientGone())
            run.close()
            self._keep(job, run.timeline())
            self.tasks.spawn(self._forget_later(job, run))

    def release_followers(self, leader: ChatJob) -> None:
        """Those that still wait for the leader's prompt are computed by themselves; soon, for a machine is at work."""
        for name, _ in leader.followers:
            if (run := self._runs.get(name)) is not None:
                asyncio.get_running_loop().call_soon(run.feed, m.LeaderGone())

    def _is_open(self, request_id: str) -> bool:
        run = self._runs.get(request_id)
        return run is not None and not run.is_over

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """What happened to a recent request of this replica, by our id or by the client's own."""
        run = self._runs.get(request_id)
        return run.timeline() if run is not None else self._timelines.get(request_id)

    def _keep(self, job: ChatJob, timeline: RequestTimeline) -> None:
        for request_id in (job.request_id, job.client_request_id):
            self._timelines.pop(request_id, None)
            self._timelines[request_id] = timeline
        while len(self._timelines) > TIMELINES_MAX:
            del self._timelines[next(iter(self._timelines))]

    async def _forget_later(self, job: ChatJob, run: RequestRun) -> None:
        """Saves may be reported after the end; late answers still give back what they brought."""
        for _ in range(LINGER_S):
            await asyncio.sleep(1.0)
            self._keep(job, run.timeline())
        if self._runs.get(job.request_id) is run:
            del self._runs[job.request_id]

    # ------------------------------------------------------------ letters

    def _on_view(self, view: View) -> None:
        alive = frozenset(view.alive())
        for group in sorted(alive - self._alive):
            if role_of(group) in ENGINE_ROLES:
                self.tasks.spawn(self._poll_forever(group))
        lost, self._alive = self._alive - alive, alive
        for group in lost:
            self._lost(group)

    async def _poll_forever(self, group: GroupRef) -> None:
        """Take one engine's letters until it is gone; its death ends the call within milliseconds.

        An engine that is only slow or out of reach for a moment keeps its letters, so it is asked again.
        """
        number = 0
        while (handle := self.directory.handle(group)) is not None:
            try:
                poll = handle.poll.remote(self.name, number, POLL_WAIT_S)
                number, letters = await asyncio.wait_for(poll, timeout=POLL_DEADLINE_S)
            except ActorDiedError:
                log.warning("lost %s", group)
                self._lost(group)
                return
            except (RayError, TimeoutError) as error:
                log.warning("%s did not answer: %s", group, type(error).__name__)
                await asyncio.sleep(POLL_RETRY_S)
                continue
            for request_id, event in letters:
                if (run := self._runs.get(request_id)) is not None:
                    run.feed(event)
            for request_id in {request_id for request_id, _ in letters}:
                if (run := self._runs.get(request_id)) is not None:
                    run.flush()

    def _lost(self, group: GroupRef) -> None:
        for run in tuple(self._runs.values()):
            run.feed(m.GroupLost(group))


def service_error(failure: m.Failure) -> ServiceError:
    """The API's error for a machine's failure."""
    match failure.status:
        case 429:
            return FullError(failure.retry_after_us / 1e6, failure.message)
        case 503:
            return UnavailableError(failure.message, failure.retry_after_us / 1e6)
        case 504:
            return DeadlineExceededError(failure.message)
        case 400:
            return PromptTooLongError(failure.message)
    return EngineError(failure.message)
