"""A small world around one request machine: real balancers, fake engines, and every message in the test's hands."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from shoal.balancers.config import DecodeConfig, EncodeConfig, PrefillConfig
from shoal.balancers.decode import DecodeBalancer
from shoal.balancers.encode import EncodeBalancer
from shoal.balancers.prefill import PrefillBalancer
from shoal.balancers.reports import DecodeReport, GroupRef
from shoal.cluster.core import messages as m
from shoal.cluster.core.entrypoint import RequestMachine
from shoal.cluster.core.job import Embedding, Job
from shoal.cluster.core.names import split_engine_id
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.core.prompt_scored import EmitScores
from shoal.engines.core.request import FinishEvent, FinishReason, ImageSpan, NoRoom, SamplingParams, TokensEvent

GRAIN, KEEP = 8, 10
POLICY = RequestPolicy(
    keep=KEEP, grain_tokens=GRAIN, deadline_us=40_000_000, progress_us=6_000_000, wait_us=5_000_000, ask_us=3_000_000
)


def token_at(index: int) -> int:
    return 1000 + 7 * index


def job(tokens: int = 40, max_tokens: int = 6, images: int = 1, **changes: Any) -> Job:
    spans = tuple(ImageSpan(2 + 12 * i, 10, 2, 3, bytes([i]) * 16) for i in range(images))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Job("r", tuple(range(tokens)), sampling, spans, (24,) * images, **changes)


@dataclass
class World:
    """`calls` and `events` are in flight; `deliver_*` lets one arrive. `held` is what engines hold for the request."""

    machine: RequestMachine
    matched: int = 0
    rooms: int = 100
    now_us: int = 1_000
    calls: list[m.Effect] = field(default_factory=list)
    events: list[m.Event] = field(default_factory=list)
    held: set[tuple[GroupRef, str]] = field(default_factory=set)
    lives: dict[str, int] = field(default_factory=dict)
    emitted: list[int] = field(default_factory=list)
    finishes: list[m.Finish] = field(default_factory=list)
    submits: list[m.Submit] = field(default_factory=list)
    effects: list[m.Effect] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    wake_us: int = 0
    rooms_refused: int = 0

    def __post_init__(self) -> None:
        self.prefill = PrefillBalancer(PrefillConfig(grain_tokens=GRAIN))
        self.decode = DecodeBalancer(DecodeConfig(block_tokens=GRAIN))
        self.encode = EncodeBalancer(EncodeConfig())
        self.lives |= {f"{role}/{i}": 1 for role in ("prefill", "decode", "encode") for i in range(2)}
        self.publish()

    def ref(self, name: str) -> GroupRef:
        return GroupRef(name, self.lives[name])

    def publish(self) -> None:
        for role, balancer in (("prefill", self.prefill), ("decode", self.decode), ("encode", self.encode)):
            balancer.set_ready(tuple(self.ref(n) for n in sorted(self.lives) if n.startswith(role)), self.now_us)
        for name in sorted(self.lives):
            if name.startswith("decode"):
                self.decode.report(DecodeReport(self.ref(name), 1, 50, 50, 8, 0, 8), self.now_us)

    def on(self, event: m.Event) -> None:
        for effect in self.machine.on(event, self.now_us):
            self.effects.append(effect)
            match effect:
                case m.Emit(tokens):
                    assert not self.finishes, "a token after the end"
                    assert (tokens.request_id, tokens.index) == ("r", len(self.emitted))
                    self.emitted += tokens.token_ids
                case m.Finish():
                    self.finishes.append(effect)
                case m.WakeAt(at_us):
                    assert at_us > self.now_us, f"wake at {at_us}, it is {self.now_us}"
                    self.wake_us = at_us
                case m.Abort(group, name, _):
                    self.held.discard((group, name))
                    self.aborted.add(name)
                    self.poison(name)
                case m.ReleaseChoice(balancer, reservation):
                    getattr(self, balancer).release(reservation)
                case m.ReleaseFollowers() | EmitScores():
                    pass
                case _:
                    self.calls.append(effect)
        self.check()

    def check(self) -> None:
        assert len(self.finishes) <= 1
        assert self.emitted == [token_at(i) for i in range(len(self.emitted))]

    def arrive(self, call: m.Effect) -> None:
        """A call reaches its peer, which acts and answers."""
        match call:
            case m.Match(ask, _, _, limit):
                ends = tuple(range(GRAIN, min(self.matched, limit) + 1, GRAIN))
                self.events.append(m.Matched(ask, self.matched, ends, tuple(bytes([e]) for e in ends)))
            case m.ChooseEncoder(ask, need):
                self.events.append(m.Chosen(ask, self.encode.choose(need, self.now_us)))
            case m.ChoosePrefill(ask, need):
                self.events.append(m.Chosen(ask, self.prefill.choose(need, self.now_us)))
            case m.ChooseDecode(ask, need):
                self.events.append(m.Chosen(ask, self.decode.choose(need, self.now_us)))
            case _ if isinstance(call, m.Encode | m.Reserve | m.Submit) and call.group != self.ref(call.group.name):
                self.events.append(m.CallFailed(call.ask, "its group is gone"))
            case m.Encode(ask, group, _, index):
                self.events.append(m.Encoded(ask, Embedding(index, bytes([index]) * 16, group, object())))
            case m.Reserve(ask, group, _, sequence):
                if self.rooms_refused > 0:
                    self.rooms_refused -= 1
                    self.events.append(m.ReserveRefused(ask, NoRoom(blocks_short=1)))
                else:
                    self.held.add((group, sequence))
                    self.events.append(m.Reserved(ask, f"ticket of {sequence}"))
            case m.Submit():
                self.compute(call)
            case _:
                raise AssertionError(f"no peer for {call}")

    def compute(self, call: m.Submit) -> None:
        """What engines say about a sequence that nothing happens to."""
        self.submits.append(call)
        request, n, group = call.request, call.attempt, call.group
        assert split_engine_id(request.request_id) == ("r", n)
        outputs = request.token_ids[request.prompt_len :]
        assert outputs == tuple(token_at(i) for i in range(len(outputs)))
        needed = {i for i, span in enumerate(request.images) if span.end > request.hit_tokens}
        assert {e.image_index for e in call.embeddings} == needed
        if call.target is not None:
            assert call.ticket == f"ticket of {request.request_id}"
        last = call.target or group
        length, count = len(request.token_ids), request.sampling.max_tokens
        self.held.add((group, request.request_id))
        cuts = [len(outputs), *range(len(outputs) + 1, count, 2), count]  # the prompt's token, then two a step
        events = [TokensEvent(request.request_id, a, tuple(map(token_at, range(a, b)))) for a, b in pairwise(cuts)]
        self.events += [
            m.Submitted(call.ask),
            m.PrefillStarted(n, group, request.hit_tokens),
            m.ChunkDone(n, group, length - request.hit_tokens, length),
            m.Tokens(n, group, events[0]),
        ]
        if call.target is not None and len(events) > 1:
            self.events.append(m.Admitted(n, call.target, 100, 5))
        ended_at = last if len(events) > 1 else group
        self.events += [m.Tokens(n, last, event) for event in events[1:]]
        self.events.append(m.Ended(n, ended_at, FinishEvent(request.request_id, FinishReason.LENGTH, count)))

    def receive(self, event: m.Event) -> None:
        """An event reaches the machine. Engines that say it is over (or handed off) hold nothing any more."""
        match event:
            case m.Ended(n, group, _):
                self.held.discard((group, f"r/{n}"))
            case m.Admitted(n):
                self.held = {(g, s) for g, s in self.held if not (s == f"r/{n}" and g.name.startswith("prefill"))}
        self.on(event)

    def lose(self, name: str) -> None:
        """A group's life ends; the next one is ready at once."""
        lost = self.ref(name)
        self.held = {(g, s) for g, s in self.held if g != lost}
        self.lives[name] += 1
        self.publish()
        self.on(m.GroupLost(lost))

    def poison(self, name: str) -> None:
        """Whatever an aborted sequence still says is wrong from now on: nobody may listen to it."""
        for i, event in enumerate(self.events):
            if isinstance(event, m.Tokens) and event.tokens.request_id == name:
                wrong = event.tokens._replace(token_ids=(-1,) * len(event.tokens.token_ids))
                self.events[i] = replace(event, tokens=wrong)

    def may_be_lost(self, index: int) -> bool:
        """An answer to a call that overtook its own abort is not lost here: an engine lease covers that."""
        event = self.events[index]
        if isinstance(event, m.Reserved):
            return str(event.ticket).removeprefix("ticket of ") not in self.aborted
        return not (isinstance(event, m.Submitted) and self.aborted)

    def advance(self, us: int) -> None:
        self.now_us += us
        if self.wake_us and self.now_us >= self.wake_us:
            self.wake_us = 0
            self.on(m.Tick())

    def run(self, until: type[m.Event] | None = None) -> "World":
        """Deliver everything in order, time only when nothing else happens; stop before an event of `until`."""
        for _ in range(10_000):
            if self.calls:
                self.arrive(self.calls.pop(0))
            elif self.events and until is not None and isinstance(self.events[0], until):
                return self
            elif self.events:
                self.receive(self.events.pop(0))
            elif self.wake_us and not self.finishes:
                self.advance(self.wake_us - self.now_us)
            else:
                return self
        raise AssertionError(f"still {self.machine.state} after 10,000 events")

    def check_nothing_left(self) -> None:
        assert len(self.finishes) == 1
        assert not self.held, f"left behind: {self.held}"
        assert self.prefill.holds == self.decode.holds == self.encode.holds == 0


def start(policy: RequestPolicy = POLICY, **changes: Any) -> World:
    matched = changes.pop("matched", 0)
    world = World(RequestMachine(job(**changes), policy), matched=matched)
    world.on(m.Begin())
    return world
