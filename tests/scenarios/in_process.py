"""A whole cluster in one process: the live shells over handles, a directory, a transfer hub and faults of our own."""

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from shoal.balancers.reports import GroupRef
from shoal.cluster.api.errors import ServiceError
from shoal.cluster.api.jobs import ChatJob
from shoal.cluster.commands.running import make_spec
from shoal.cluster.commands.validate import load
from shoal.cluster.core.handoff import Group
from shoal.cluster.core.membership import Member, MemberState, View
from shoal.cluster.core.state import State
from shoal.cluster.core.timeline import RequestTimeline
from shoal.cluster.live.balancer import BalancerActor
from shoal.cluster.live.encoder import EncoderActor
from shoal.cluster.live.engine import EngineActor
from shoal.cluster.live.entrypoint import EntrypointService
from shoal.cluster.live.names import (
    DECODE_BALANCER,
    ENCODE_BALANCER,
    ENCODER,
    ENGINE_ROLES,
    INDEX,
    NODE,
    PREFILL_BALANCER,
    role_of,
)
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.store import IndexActor, StoreNodeActor
from shoal.cluster.live.surroundings import Surroundings
from shoal.cluster.live.transfer_in_process import Fault as WriteFault
from shoal.cluster.live.transfer_in_process import InProcessHub, InProcessTransfer
from shoal.engines.config import EngineConfig, VerifyMode
from shoal.engines.core.request import ImageSpan, PromptScore, SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE_TOKENS = 14  # 3 x 3 and its delimiters
OPEN_S = 30.0
ASK_S = 90.0
QUIET_S = 25.0  # a busy machine is slow; holds of balancers last longer: what is given back counts, not what runs out
HOLD_US = 300_000_000
LIMITS = {"match_us": 5_000_000, "ask_us": 20_000_000, "progress_us": 30_000_000, "gap_us": 2_000_000}
LATE_S = 0.03
LAND_S = 0.005


class Fault(StrEnum):
    """What happens to one call."""

    NONE = "none"
    LOSE = "lose"  # never arrives, and nobody says so
    FAIL = "fail"  # never arrives, and the caller is told
    FAIL_AFTER = "fail after"  # is done, and the caller is told that it failed
    LATE = "late"
    TWICE = "twice"


class Reference:
    """A shared value: awaited it is the value, as an argument it arrives as the value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, Any]:
        if self.value is None:
            raise ActorDiedError()
        return self.value
        yield


class Call:
    """A call under way; several may wait for it, and none can take it back."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def __await__(self) -> Generator[Any, Any, Any]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def future(self) -> "Future[Any]":
        return self._future


class Method:
    def __init__(self, life: "Life", name: str) -> None:
        self._life, self._name = life, name

    def remote(self, *args: Any) -> Call:
        return self._life.call(self._name, args)


class Handle:
    """What others hold of a life: `handle.method.remote(...)`."""

    def __init__(self, life: "Life") -> None:
        self._life = life

    def __getattr__(self, name: str) -> Method:
        return Method(self._life, name)


@dataclass(eq=False)
class Life:
    """One life of one member."""

    world: "World"
    group: GroupRef
    actor: Any = None
    is_open: bool = False
    is_dead: bool = False
    pending: "set[Future[Any]]" = field(default_factory=set)

    def call(self, method: str, args: tuple[Any, ...]) -> Call:
        """Start a call from any thread."""
        future: Future[Any] = Future()
        if self.is_dead:  # also after the end of the scenario, when its loop is closed
            future.set_exception(ActorDiedError())
        else:
            self.world.loop.call_soon_threadsafe(self._start, future, method, args)
        return Call(future)

    def _start(self, future: "Future[Any]", method: str, args: tuple[Any, ...]) -> None:
        if self.is_dead:
            future.set_exception(ActorDiedError())
            return
        self.pending.add(future)
        self.world.spawn(self._carry_out(future, method, args, self.world.call_fault(self.group, method)))

    async def _carry_out(self, future: "Future[Any]", method: str, args: tuple[Any, ...], fault: Fault) -> None:
        if fault is Fault.LOSE:
            return
        if fault is Fault.FAIL:
            self._end(future, None, ActorUnavailableError("injected", b"x" * 16))
            return
        if fault is Fault.LATE:
            await asyncio.sleep(self.world.dice.random() * LATE_S)
        result, error = None, None
        values = [a.value if isinstance(a, Reference) else a for a in args]
        for _ in range(2 if fault is Fault.TWICE else 1):
            if self.is_dead:
                return
            try:
                result = await getattr(self.actor, method)(*values)
            except Exception as raised:
                error = RayTaskError(method, repr(raised), raised).as_instanceof_cause()
                if not self.is_dead:
                    self.world.raised.append(f"{self.group}.{method}: {raised!r}")
        if fault is Fault.FAIL_AFTER:
            error = ActorUnavailableError("injected", b"x" * 16)
        self._end(future, result, error)

    def _end(self, future: "Future[Any]", result: Any, error: Exception | None) -> None:
        self.pending.discard(future)
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def die(self) -> None:
        """As SIGKILL: every call fails, nothing that is held is given back."""
        self.is_dead = True
        for future in tuple(self.pending):
            self._end(future, None, ActorDiedError())
        if self.actor is not None:
            self.actor.close()


class InProcessMembers:
    """What one member (or entrypoint: life None) sees of the world."""

    def __init__(self, world: "World", life: Life | None, on_view: Callable[[View], None]) -> None:
        self._world, self._life, self._on_view = world, life, on_view
        self._handles: dict[GroupRef, Handle] = {}
        self.view = View(0)

    def handle(self, group: GroupRef) -> Handle | None:
        is_dead = self._life is not None and self._life.is_dead
        return None if is_dead else self._handles.get(group)

    def only(self, role: str) -> Handle | None:
        ready = self.view.ready(role)
        return self.handle(ready[0]) if ready else None

    async def follow(self) -> None:
        while True:
            await self._world.view_after(self.view.number)
            self.view, self._handles = self._world.view, self._world.handles()
            self._on_view(self.view)


class Loud(logging.Handler):
    """Keeps errors of the parts: a scenario must not cause one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@dataclass
class Answer:
    """What one request got, and how."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    error: str = ""
    prompt_scores: tuple[PromptScore, ...] = ()
    timeline: RequestTimeline | None = None

    def count(self, what: str) -> int:
        return sum(mark.what == what for mark in self.timeline.marks)


class World:
    """The cluster of one scenario. Faults are functions that a scenario sets at any time."""

    def __init__(self, spec: ClusterSpec, build: Callable[..., Any], seed: int, silent_s: float) -> None:
        self.spec, self._build, self._silent_s = spec, build, silent_s
        self.dice = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.hub = InProcessHub(lambda *write: self.write_fault(*write))
        self.write_fault: Callable[[str, str, bytes | None], WriteFault] = lambda *_: WriteFault.NONE
        self.call_fault: Callable[[GroupRef, str], Fault] = lambda *_: Fault.NONE
        self.lives: dict[str, Life] = {}
        self.view = View(1)
        self.services: list[EntrypointService] = []
        self.raised: list[str] = []
        self.loud = Loud()
        self.ended: list[tuple[GroupRef, int]] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ members

    async def start(self) -> None:
        self.spawn(self._land_forever())
        cluster = self.spec.cluster
        names = [f"{role}/{i}" for role, count in self.spec.desired for i in range(count)]
        await asyncio.gather(*(self.begin(name) for name in names))
        assert cluster.transfer is not None

    async def begin(self, name: str) -> None:
        """The next life of a member."""
        epoch = self.lives[name].group.epoch + 1 if name in self.lives else 1
        life = self.lives[name] = Life(self, GroupRef(name, epoch))
        life.actor = self._actor(life)
        await life.actor.open()
        life.is_open = True
        self._announce()

    def kill(self, name: str) -> None:
        """End a life now; membership notices at once, its peers a moment later."""
        self.lives[name].die()
        self.hub.lose(Group(name, self.lives[name].group.epoch).agent)
        self._announce()

    def replace(self, group: GroupRef) -> None:
        """A life has ended by itself: the next one begins."""
        if self.lives[group.name].group == group and not self.lives[group.name].is_dead:
            self.kill(group.name)
            self.spawn(self.begin(group.name))

    async def renew(self, name: str, pause_s: float = 0.0) -> None:
        """A life ends, and after a while the next one begins."""
        self.kill(name)
        await asyncio.sleep(pause_s)
        await self.begin(name)

    def actor(self, name: str) -> Any:
        return self.lives[name].actor

    def engines(self) -> list[EngineActor]:
        return [x.actor for x in self.lives.values() if role_of(x.group) in ENGINE_ROLES and not x.is_dead]

    def handles(self) -> dict[GroupRef, Handle]:
        return {life.group: Handle(life) for life in self.lives.values() if not life.is_dead}

    async def view_after(self, number: int) -> None:
        while self.view.number == number:
            await self._changed.wait()

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def place(self, life: Life | None) -> Surroundings:
        def end(code: int) -> None:
            assert life is not None
            self.ended.append((life.group, code))
            self.loop.call_soon_threadsafe(self.replace, life.group)

        return Surroundings(
            members=lambda cluster, on_view: InProcessMembers(self, life, on_view),
            put=Reference,
            build=lambda spec, group, ranks: self._build(spec, group, lambda name: InProcessTransfer(name, self.hub)),
            end=end,
            find=lambda cluster, group: self.handles().get(group),
            host=lambda: "127.0.0.1",
        )

    def _actor(self, life: Life) -> Any:
        role, place, group = role_of(life.group), self.place(life), life.group
        if role in ENGINE_ROLES:
            return EngineActor(self.spec, group, place, self._silent_s)
        if role == NODE:
            return StoreNodeActor(self.spec, group)
        kinds = {INDEX: IndexActor, ENCODER: EncoderActor}
        return kinds.get(role, BalancerActor)(self.spec, group, place)

    def _announce(self) -> None:
        """Members that are open are ready."""
        ready = [life for life in self.lives.values() if life.is_open and not life.is_dead]
        members = tuple(Member(life.group, role_of(life.group), MemberState.READY) for life in ready)
        self.view = View(self.view.number + 1, members)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _land_forever(self) -> None:
        while True:
            await asyncio.sleep(LAND_S)
            self.hub.flush()

    async def close(self) -> None:
        for service in self.services:
            service.tasks.cancel()
        for life in self.lives.values():
            if not life.is_dead:
                life.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ asking

    async def entrypoint(self) -> EntrypointService:
        service = EntrypointService(self.spec, f"test-{len(self.services)}", 1, self.place(None))
        self.services.append(service)
        service.start()
        await until(service.ready, "every role has a ready member")
        return service

    async def ask(
        self, service: EntrypointService, job: ChatJob, on_tokens: Callable[[Answer], object] = lambda answer: None
    ) -> Answer:
        """One request to its end, good or bad; `on_tokens` is called after each batch."""
        answer = Answer()
        try:
            async with asyncio.timeout(ASK_S):
                async for batch in service.submit(job):
                    answer.token_ids += batch.token_ids
                    answer.prompt_scores = batch.prompt_scores or answer.prompt_scores
                    answer.cached_tokens = batch.cached_tokens or answer.cached_tokens
                    answer.finish = str(batch.finish_reason or "")
                    on_tokens(answer)
        except ServiceError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.timeline = service.timeline(job.request_id)
        return answer

    def job(self, number: int, tokens: int, outputs: int, image: bool = False, **fields: Any) -> ChatJob:
        """A random prompt of about `tokens` tokens, with a picture in its middle if asked for."""
        rng = np.random.default_rng(number)
        ids = [0, *rng.integers(16, 900, tokens).tolist()]
        spans: tuple[ImageSpan, ...] = ()
        canvases: tuple[np.ndarray, ...] = ()
        if image:
            canvas = rng.integers(0, 256, (126, 126, 3)).astype(np.uint8)
            start = tokens // 2
            ids[start:start] = [image_token_id(self.spec.model_dir)] * IMAGE_TOKENS
            spans = (ImageSpan(start, IMAGE_TOKENS, 3, 3, digest=canvas.tobytes()[:32]),)
            canvases = (canvas,)
        sampling = {k: fields.pop(k) for k in tuple(fields) if k in SamplingParams.__dataclass_fields__}
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": outputs, "ignore_eos": True} | sampling))
        return ChatJob(
            request_id=f"t{number}-{uuid.UUID(int=self.dice.getrandbits(128)).hex[:8]}",
            token_ids=tuple(ids),
            sampling=params,
            spans=spans,
            canvases=canvases,
            **({"cache_salt": str(number)} | fields),
        )

    def choices(self, n: int, *args: Any, **fields: Any) -> list[ChatJob]:
        """A request for n answers, as the HTTP side makes it: one job each, seeds one apart; the first leads."""
        first = self.job(*args, **fields)
        names = [f"{first.request_id}-{i}" for i in range(n)]
        seeds = [first.sampling.seed + i for i in range(n)]
        followers = tuple(zip(names[1:], seeds[1:], strict=True))
        jobs = [
            replace(first, request_id=name, sampling=replace(first.sampling, seed=seed), choice=i, n=n, leader=names[0])
            for i, (name, seed) in enumerate(zip(names, seeds, strict=True))
        ]
        return [replace(jobs[0], leader="", followers=followers), *jobs[1:]]

    # ------------------------------------------------------------ what is left

    async def quiet(self) -> None:
        """Nothing is held for anybody, anywhere, and no part has failed."""
        self.call_fault, self.write_fault = lambda *_: Fault.NONE, lambda *_: WriteFault.NONE
        await until(lambda: not self.held(), self.held, QUIET_S)
        for engine in self.engines():
            await engine._parts.steps.call(lambda e: e.check())
        # A task of a killed part may be collected before it has seen its cancellation: a real process just ends.
        raised = [what for what in self.raised if "destroyed" not in what or "Task cancelling" not in what]
        assert not raised, raised
        assert not self.loud.lines, self.loud.lines

    def held(self) -> list[str]:
        """What somebody still holds, in words."""
        found = [word for engine in self.engines() for word in held_by_engine(engine)]
        for role in (PREFILL_BALANCER, DECODE_BALANCER, ENCODE_BALANCER):
            core = self.actor(f"{role}/0")._core
            if len(core._held):
                found.append(f"{role} holds {list(core._held._holds)}")
        if pins := self.actor("index/0")._service.usage().pins:
            found.append(f"index has {pins} pins")
        for service in self.services:
            open_runs = {name: run._machine.state for name, run in service._runs.items()}
            found += [f"{name} is {state}" for name, state in open_runs.items() if state is not State.ENDED]
        return found


def held_by_engine(engine: EngineActor) -> list[str]:
    """What one engine still holds, in words."""
    parts, who = engine._parts, str(engine._group)
    inner = parts.steps._engine
    ledger = inner._scheduler.ledger
    capacity = inner.capacity()
    counts = {
        "sequences": len(parts.sequences),
        "tickets": parts.open_tickets(),
        "blocks": capacity.blocks_count - capacity.blocks_free,
        "slots": capacity.slots_count - capacity.slots_free,
        "reservations": len(ledger.reservations),
        "requests": len(inner._held),
        "image rows": len(inner._images),
        "loads": len(parts._loader._cancelled),
        "letters": sum(len(box.letters) for box in parts.outbox._boxes.values()),
    }
    if parts.target is not None:
        target = parts.target
        counts |= {
            "target reservations": len(target._reservations),
            "openings": len(target._opening),
            "states": len(target._state_us),
            "admitted tickets": len(target._admitted),
        }
    if parts.source is not None:
        source = parts.source
        counts |= {
            "outgoing": len(source._outgoing),
            "names": len(source._by_sequence),
            "works": len(source._work_of),
            "tasks": len(source._tasks),
        }
    return [f"{who} holds {count} {what}" for what, count in counts.items() if count]


async def until(condition: Callable[[], object], what: Any, seconds: float = OPEN_S) -> None:
    """Wait for a condition; after the deadline say what is missing."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not so after {seconds} s: {what() if callable(what) else what}") from None


@cache
def image_token_id(model_dir: str) -> int:
    from shoal.engines.model.config import ModelConfig

    return ModelConfig.from_dir(Path(model_dir)).image_token_id


@cache
def cluster_of_manifest() -> Any:
    return load(ROOT / "manifests" / "local.yaml")[0]


def without_drafts(config: EngineConfig) -> EngineConfig:
    """The same engine, so that sampled answers are the plain loop's draws and no engine has to time its steps."""
    return replace(config, drafts=0, verify=VerifyMode.FULL)


@asynccontextmanager
async def running(
    folder: Path,
    build: Callable[..., Any],
    seed: int = 0,
    lease_s: float = 20.0,
    silent_s: float = 15.0,
    lost_after_s: float = 5.0,
    **policy: int,
) -> AsyncGenerator[World, None]:
    """The demo manifest's cluster; `policy` replaces limits of a request (microseconds)."""
    cluster = cluster_of_manifest()
    cluster = replace(
        cluster,
        prefill_balancer=replace(cluster.prefill_balancer, reservation_us=HOLD_US),
        decode_balancer=replace(cluster.decode_balancer, reservation_us=HOLD_US),
        encode_balancer=replace(cluster.encode_balancer, reservation_us=HOLD_US),
        membership=replace(cluster.membership, lost_after_us=int(lost_after_s * 1e6)),
        transfer=replace(cluster.transfer, lease_us=int(lease_s * 1e6)),
        policy=replace(cluster.policy, **LIMITS | policy),
    )
    world = World(make_spec(cluster, folder), build, seed, silent_s)
    logger = logging.getLogger("shoal")
    kept = logger.handlers[:]
    logger.handlers[:] = [world.loud]
    world.loop.set_exception_handler(lambda _, context: world.raised.append(str(context)))
    try:
        async with asyncio.timeout(OPEN_S):
            await world.start()
        yield world
    finally:
        await world.close()
        logger.handlers[:] = kept
