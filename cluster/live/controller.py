"""The controller actor: performs what the membership core decides, and tells everybody who is in the cluster.

It is the one member with a fixed name, and Ray restarts it. A new life finds the members that still run by
their actor names, adopts them with their epochs, and goes on; nothing else has to survive.
"""

import asyncio
import logging
import os
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from shoal.balancers.reports import GroupRef
from shoal.cluster.core.membership import (
    Desire,
    Died,
    Drain,
    Drained,
    Effect,
    Event,
    Found,
    Health,
    Heartbeat,
    Lost,
    Membership,
    Publish,
    Start,
    StartDraining,
    Started,
    Stop,
    Tick,
    View,
    WakeAt,
)
from shoal.cluster.live.clock import SteadyClock, now_us
from shoal.cluster.live.directory import WATCH_S
from shoal.cluster.live.logs import begin_logging
from shoal.cluster.live.members import create_member
from shoal.cluster.live.names import parse_actor_name, role_of
from shoal.cluster.live.session import NAMESPACE
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.tasks import Tasks

log = logging.getLogger(__name__)

PING_PERIOD_S = 1.0
STALL_S = 1.5  # a controller that has not looked for so long was itself stopped or starved


class Controller:
    """Owns membership. Every method may be called at any time and again."""

    def __init__(self, spec: ClusterSpec) -> None:
        begin_logging("controller")
        self._spec = spec
        # Epochs grow with time, so a life that a dead controller started and nobody recorded cannot be reused.
        self._core = Membership(spec.membership, first_epoch=1 + (now_us() - spec.created_us) // 1_000_000)
        self._clock = SteadyClock(STALL_S)
        self._handles: dict[GroupRef, Any] = {}
        self._view_base = now_us() // 1000  # a restarted controller must number its views above its predecessor's
        self._changed = asyncio.Event()
        self._wake: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._losses: list[tuple[int, GroupRef, str]] = []
        self._begun = False
        self._adopted = asyncio.Event()  # until then this life knows nobody, and must not say so

    def _begin_once(self) -> None:
        """An actor's constructor has no running loop, so the first call starts supervision."""
        if not self._begun:
            self._begun = True
            self._tasks.spawn_vital(self._begin())

    async def _known(self) -> None:
        """Returns when this life has found what already runs."""
        self._begin_once()
        await self._adopted.wait()

    async def _begin(self) -> None:
        found = []
        for entry in ray.util.list_named_actors(all_namespaces=True):
            group = parse_actor_name(self._spec.name, entry["name"])
            if group is not None and entry["namespace"] == NAMESPACE:
                found.append(self._adopt(group, entry["name"]))
        # All at once: a silent one must not cost the others, whose time to be heard from begins when they are found.
        for group, handle in filter(None, await asyncio.gather(*found)):
            self._handles[group] = handle
            self._on(Found(group, role_of(group)))
            self._tasks.spawn(self._watch_life(group, handle))
        for role, count in self._spec.desired:
            self._on(Desire(role, count, self._spec.ranks(role)))
        self._adopted.set()
        await self._ping_all()

    async def _adopt(self, group: GroupRef, name: str) -> tuple[GroupRef, Any] | None:
        """A life that runs and serves; any other is ended, since a new one will be started in its place."""
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None  # it has just gone
        try:
            ready = await asyncio.wait_for(handle.ping.remote(), timeout=5 * PING_PERIOD_S)
        except (RayError, TimeoutError) as error:
            log.warning("%s does not answer (%s): it is ended and replaced", group, type(error).__name__)
            ready = False
        if ready:
            return group, handle
        ray.kill(handle)
        return None

    # ------------------------------------------------------------ calls

    async def ping(self) -> bool:
        """Begin supervising if this life has not yet; any call of the directory's does the same."""
        self._begin_once()
        return True

    async def spec(self) -> ClusterSpec:
        """What this cluster was started from."""
        return self._spec

    async def view(self) -> View:
        """The view now."""
        await self._known()
        return self._view()

    async def snapshot(self) -> tuple[View, dict[GroupRef, Any]]:
        """The view and handles of all its members, those that are starting too."""
        await self._known()
        return self._view(), dict(self._handles)

    async def watch(self, number: int) -> tuple[View, dict[GroupRef, Any]]:
        """The view and handles of its living members as soon as its number differs from `number`, or after a while."""
        await self._known()
        if self._view().number == number:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=WATCH_S)
            except TimeoutError:
                log.debug("no change in %s s", WATCH_S)
        view = self._view()
        alive = set(view.alive())
        return view, {group: handle for group, handle in self._handles.items() if group in alive}

    async def health(self) -> Health:
        """Whether everything wanted runs."""
        await self._known()
        return self._core.health()

    async def losses(self) -> list[tuple[int, GroupRef, str]]:
        """(time, life, reason) of every life lost so far, oldest first, at most 1,000."""
        return list(self._losses)

    async def drain(self, name: str) -> None:
        """Let one member finish its work and go."""
        self._on(Drain(name))

    async def scale(self, role: str, count: int) -> None:
        """Change how many members of a role are wanted: ranks, where a group has several."""
        ranks = self._spec.ranks(role)
        if count % ranks:
            raise ValueError(f"{role} = {count} must be a multiple of {ranks}, the ranks of a group")
        self._on(Desire(role, count, ranks))

    async def pid(self) -> int:
        """Process id, for tests and status."""
        return os.getpid()

    async def shutdown(self) -> int:
        """Stop every member; the number stopped. The caller removes the controller itself."""
        self._tasks.cancel()
        for handle in self._handles.values():
            ray.kill(handle)
        return len(self._handles)

    # ------------------------------------------------------------ effects

    def _on(self, event: Event) -> None:
        for effect in self._core.on(event, self._clock.now_us()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Start(group, role):
                self._tasks.spawn(self._start(group, role))
            case Stop(group, reason):
                log.info("stop %s: %s", group, reason)
                if (handle := self._handles.pop(group, None)) is not None:
                    ray.kill(handle)
            case StartDraining(group):
                self._tasks.spawn(self._drain(group))
            case Lost(group, _, reason):
                log.warning("lost %s: %s", group, reason)
                self._losses = [*self._losses[-999:], (now_us(), group, reason)]
            case Publish():
                self._changed.set()
                self._changed = asyncio.Event()
            case WakeAt(at_us):
                if self._wake is not None:
                    self._wake.cancel()
                wait_s = max(0.0, (at_us - self._clock.now_us()) / 1e6)
                self._wake = asyncio.get_running_loop().call_later(wait_s, self._on, Tick())

    async def _start(self, group: GroupRef, role: str) -> None:
        """Create one life and bring it up; it is watched from its first moment."""
        try:
            handle = create_member(self._spec, group, role)
        except (RayError, ValueError) as error:
            self._on(Died(group, f"could not be created: {error}"))
            return
        self._handles[group] = handle
        self._tasks.spawn(self._watch_life(group, handle))
        try:
            await handle.open.remote()
        except RayActorError as error:
            self._on(Died(group, f"died while starting: {type(error).__name__}"))
        except RayTaskError as error:
            log.error("%s failed to start", group, exc_info=error)
            self._on(Died(group, f"failed to start: {type(error.cause).__name__}: {error.cause}"))
        except RayError as error:
            self._on(Died(group, f"failed to start: {type(error).__name__}"))
        else:
            self._on(Started(group))

    async def _watch_life(self, group: GroupRef, handle: Any) -> None:
        """`lifeline` never returns while the actor lives, so its end is the actor's end (seen within 10-45 ms)."""
        while True:
            try:
                await handle.lifeline.remote()
            except ActorUnavailableError:  # out of reach, perhaps for a moment: silence is counted by the core
                await asyncio.sleep(PING_PERIOD_S)
            except RayError as error:
                return self._on(Died(group, f"process ended: {type(error).__name__}"))

    async def _drain(self, group: GroupRef) -> None:
        if (handle := self._handles.get(group)) is None:
            return
        try:
            await handle.drain.remote()
        except RayError as error:
            self._on(Died(group, f"died while draining: {type(error).__name__}"))
        else:
            self._on(Drained(group))

    async def _ping_all(self) -> None:
        """A stopped process keeps its sockets and its lifeline: only silence shows it."""
        while True:
            self._clock.now_us()  # looked at regularly, whether or not anybody answers
            for group, handle in tuple(self._handles.items()):
                self._tasks.spawn(self._ping(group, handle))
            await asyncio.sleep(PING_PERIOD_S)

    async def _ping(self, group: GroupRef, handle: Any) -> None:
        try:
            await asyncio.wait_for(handle.ping.remote(), timeout=self._spec.membership.lost_after_us / 1e6)
        except (RayError, TimeoutError):
            return  # a death is reported by the lifeline, silence is counted by the core
        self._on(Heartbeat(group))

    def _view(self) -> View:
        view = self._core.view()
        return View(view.number + self._view_base, view.members)
