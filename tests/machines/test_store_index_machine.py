"""The real index against a naive one that scans everything: same matches, same content, never a hole."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shoal.kvstore.config import IndexConfig, Stay, TtlConfig
from shoal.kvstore.core.index import StoreIndex
from shoal.kvstore.core.records import Kind, StripeRecord, TableEntry, TrafficClass

GRACE_US, ORPHANS_MAX = 40, 6
CLASSES = st.sampled_from(list(TrafficClass))
# A prompt is a path of branch choices; a key is the path itself, so prefixes are shared as chain keys share them.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def key(path: tuple[int, ...]) -> bytes:
    return bytes((len(path), *(branch + 1 for branch in path))).ljust(16, b"\0")


def keys(path: tuple[int, ...]) -> list[bytes]:
    return [key(path[: at + 1]) for at in range(len(path))]


@dataclass
class NaiveGrain:
    path: tuple[int, ...]
    stripe: int
    traffic: TrafficClass
    created: int
    expires: int = 0
    last_use: int = 0
    anchor: int | None = None


@dataclass
class NaivePin:
    path: tuple[int, ...]
    traffic: TrafficClass
    ends: int


@dataclass
class Naive:
    """Every rule as a scan over all grains; a use of a grain is a use of all before it."""

    ttl: TtlConfig
    capacity: int
    stay: Stay = Stay.SLIDING
    now: int = 0
    grains: dict[tuple[int, ...], NaiveGrain] = field(default_factory=dict)
    orphans: list[tuple[int, Kind, tuple[int, ...], int, TrafficClass]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    created: dict[int, int] = field(default_factory=dict)
    pins: dict[int, NaivePin] = field(default_factory=dict)
    uses: int = 0

    def stripes(self) -> set[int]:
        held = {g.stripe for g in self.grains.values()} | {g.anchor for g in self.grains.values()}
        return (held | {orphan[3] for orphan in self.orphans}) - {None}

    def use(self, path, traffic) -> None:
        self.uses += 1
        for at in range(len(path)):
            grain = self.grains[path[: at + 1]]
            is_saved = not grain.last_use
            grain.last_use = self.uses
            if self.stay is Stay.LRU:
                grain.expires = 1 << 60
            elif self.stay is Stay.SLIDING or is_saved:
                grain.expires = max(grain.expires, self.now + self.ttl.of(traffic))

    def is_pinned(self, path) -> bool:
        return any(pin.path[: len(path)] == path for pin in self.pins.values())

    def release(self, pin: int) -> None:
        held = self.pins.pop(pin)
        self.use(held.path, held.traffic)

    def leaves(self):
        inner = {path[:-1] for path in self.grains} | {pin.path for pin in self.pins.values()}
        return [g for g in self.grains.values() if g.path not in inner]

    def advance(self, now: int) -> None:
        self.now = max(self.now, now)
        for _, pin in sorted((held.ends, pin) for pin, held in self.pins.items() if held.ends <= self.now):
            self.release(pin)
        for root in [g for g in self.grains.values() if len(g.path) == 1]:
            if root.created + self.ttl.max_age_us <= self.now:
                for path in [path for path in self.grains if path[0] == root.path[0]]:
                    del self.grains[path]
        for path in [p for p, g in self.grains.items() if g.expires <= self.now and not self.is_pinned(p)]:
            for behind in [other for other in self.grains if other[: len(path)] == path]:
                del self.grains[behind]
        self.orphans = [orphan for orphan in self.orphans if orphan[0] > self.now]

    def matched(self, path) -> int:
        return next((at for at in range(len(path)) if path[: at + 1] not in self.grains), len(path))

    def insert(self, objects, stripe, traffic) -> None:
        before = set(self.grains)
        for kind, path in objects:
            self.attach(kind, path, stripe, traffic)
        new = [path for path in self.grains if path not in before]  # in order of arrival
        for path in new:
            behind = [other for other in new if other[:-1] == path]
            if all(self.grains[other].traffic != self.grains[path].traffic for other in behind):
                self.use(path, self.grains[path].traffic)
        self.evict()

    def attach(self, *item) -> None:
        ready = [item]
        while ready:
            ready += self.attach_one(*ready.pop(0))

    def attach_one(self, kind, path, stripe, traffic) -> list[tuple]:
        """Store one object or let it wait; the objects that waited for it."""
        needed = path[:-1] if kind is Kind.GRAIN else path
        if kind is Kind.GRAIN and path in self.grains:
            return []
        if needed and needed not in self.grains:
            waits = any(o[1] is kind and o[2] == path for o in self.orphans)
            if not waits and len(self.orphans) < ORPHANS_MAX:
                self.orphans.append((self.now + GRACE_US, kind, path, stripe, traffic))
            return []
        if kind is Kind.ANCHOR:
            self.grains[path].anchor = stripe if self.grains[path].anchor is None else self.grains[path].anchor
            return []
        self.grains[path] = NaiveGrain(path, stripe, traffic, min(self.now, self.created[stripe]))
        freed = [o for o in self.orphans if (o[2][:-1] if o[1] is Kind.GRAIN else o[2]) == path]
        self.orphans = [orphan for orphan in self.orphans if orphan not in freed]
        return [orphan[1:] for orphan in freed]

    def evict(self) -> None:
        while sum(self.sizes[stripe] for stripe in self.stripes()) > self.capacity and self.leaves():
            worst = min(self.leaves(), key=lambda g: (g.last_use, -len(g.path)))
            del self.grains[worst.path]


class IndexMachine(RuleBasedStateMachine):
    max_age_us = 10**9
    has_pins = True
    stay = Stay.SLIDING

    @initialize(capacity=st.integers(2, 12))
    def start(self, capacity: int) -> None:
        ttl = TtlConfig(agent_us=60, chat_us=150, default_us=90, max_age_us=self.max_age_us)
        config = IndexConfig(capacity * 10, ttl, 128, GRACE_US, ORPHANS_MAX, self.stay)
        self.real, self.naive = StoreIndex(config, "boot"), Naive(ttl, capacity * 10, self.stay)
        self.now = 0
        self.freed: set[tuple[bytes, int]] = set()

    @rule(step=st.integers(0, 70))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.real.expire(self.now)
        self.naive.advance(self.now)

    @rule(
        path=PATHS,
        first=st.integers(0, 5),
        anchors=st.sets(st.integers(1, 6)),
        traffic=CLASSES,
        size=st.integers(5, 15),
        age=st.integers(0, 30),
    )
    def insert(self, path, first, anchors, traffic, size, age) -> None:
        number = len(self.naive.sizes) + 1
        table, objects = [], []
        for at in range(min(first, len(path) - 1), len(path)):
            own = path[: at + 1]
            for kind in (Kind.GRAIN, Kind.ANCHOR) if at + 1 in anchors else (Kind.GRAIN,):
                parent = key(own[:-1]) if at else bytes(16)
                table.append(TableEntry(kind, key(own), parent, at, traffic, 0, 1, bytes(16)))
                objects.append((kind, own))
        created = max(0, self.now - age)
        record = StripeRecord(number.to_bytes(16), 1, 10, 2, size, size, created, (None,) * 12, tuple(table))
        self.naive.sizes[number], self.naive.created[number] = size, created
        self.real.insert(record, self.now)
        self.naive.advance(self.now)
        self.naive.insert(objects, number, traffic)

    @rule(path=PATHS, limit=st.integers(0, 6 * 128 + 5), traffic=st.none() | CLASSES)
    def match(self, path, limit, traffic) -> None:
        match = self.real.match(keys(path), limit, self.now, traffic)
        self.naive.advance(self.now)
        matched = self.naive.matched(path)
        anchors = [at for at in range(1, matched + 1) if self.naive.grains[path[:at]].anchor and at * 128 <= limit]
        assert (match.grains_matched, match.anchor_grain) == (matched, max(anchors, default=0))
        if matched:
            own = traffic or self.naive.grains[path[:matched]].traffic
            self.naive.use(path[:matched], own)

    @rule(path=PATHS, hold=st.integers(1, 150))
    def pin(self, path, hold) -> None:
        if not self.has_pins:
            return
        located = self.real.locate(keys(path), "owner", hold, self.now)
        self.naive.advance(self.now)
        matched = self.naive.matched(path)
        assert len(located.grain_stripes) == matched
        for at, place in enumerate(located.grain_stripes):
            grain = self.naive.grains[path[: at + 1]]
            assert located.stripes[place].stripe_id == grain.stripe.to_bytes(16)
        if matched:
            traffic = self.naive.grains[path[:matched]].traffic
            self.naive.use(path[:matched], traffic)
            self.naive.pins[located.pin] = NaivePin(path[:matched], traffic, self.now + hold)

    @rule(data=st.data())
    def unpin(self, data) -> None:
        if self.naive.pins:
            pin = data.draw(st.sampled_from(sorted(self.naive.pins)))
            assert self.real.release(pin)
            self.naive.release(pin)

    @rule(number=st.integers(0, 99))
    def hit_what_is_stored(self, number) -> None:
        if self.naive.grains:
            path = sorted(self.naive.grains)[number % len(self.naive.grains)]
            self.match(path, len(path) * 128, None)

    @rule(number=st.integers(0, 99), hold=st.integers(1, 150))
    def pin_what_is_stored(self, number, hold) -> None:
        if self.naive.grains:
            self.pin(sorted(self.naive.grains)[number % len(self.naive.grains)], hold)

    @rule(number=st.integers(0, 99), traffic=CLASSES, size=st.integers(5, 15))
    def extend_what_is_stored(self, number, traffic, size) -> None:
        if self.naive.grains:
            path = sorted(self.naive.grains)[number % len(self.naive.grains)]
            if len(path) < 6:
                self.insert((*path, number % 2), len(path), set(), traffic, size, 0)

    @rule(number=st.integers(0, 99))
    def lose_a_stripe(self, number) -> None:
        if not self.naive.grains:
            return
        stripe = self.naive.grains[sorted(self.naive.grains)[number % len(self.naive.grains)]].stripe
        self.real.report_lost(stripe.to_bytes(16), 1)
        for lost in [g.path for g in self.naive.grains.values() if g.stripe == stripe]:
            for behind in [p for p in self.naive.grains if p[: len(lost)] == lost]:
                del self.naive.grains[behind]
        for other in self.naive.grains.values():
            other.anchor = None if other.anchor == stripe else other.anchor
        self.naive.orphans = [orphan for orphan in self.naive.orphans if orphan[3] != stripe]
        for pin in self.naive.pins.values():
            pin.path = pin.path[: self.naive.matched(pin.path)]

    @invariant()
    def same_content_and_no_hole(self) -> None:
        if not hasattr(self, "real"):
            return
        real = self.real._grains
        assert set(real._number) == {key(path) for path in self.naive.grains}
        assert self.real._policy.live == len(real)
        for path in self.naive.grains:
            assert len(path) == 1 or key(path[:-1]) in real, f"hole before {path}"
            chain = real.chain(real.find(key(path)))
            assert [real._keys[grain] for grain in chain] == keys(path)
        usage = self.real.usage
        assert usage.orphans == len(self.naive.orphans)
        assert usage.anchors == sum(g.anchor is not None for g in self.naive.grains.values())
        assert usage.pins == len(self.naive.pins)
        live = self.naive.stripes()
        assert usage.stripes == len(live)
        assert usage.stored_bytes - usage.freed_bytes == sum(self.naive.sizes[stripe] for stripe in live)
        freed = {int.from_bytes(record.stripe_id) for record in self.real.freed(10**6)}
        assert freed == set(self.naive.sizes) - live


class AgeMachine(IndexMachine):
    max_age_us = 200
    has_pins = False


class FixedMachine(IndexMachine):
    stay = Stay.FIXED


class LruMachine(IndexMachine):
    stay = Stay.LRU


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAgeMachine = AgeMachine.TestCase
TestAgeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFixedMachine = FixedMachine.TestCase
TestFixedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
