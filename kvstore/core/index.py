"""The index: which grains and anchors are stored, where, how recently used and pinned; pure, no clock, no I/O.

Grains form a forest by parent key. Three rules make every operation cost what it touches and no more:

- A grain goes only after all grains behind it, so what is stored is always a set of prefixes without holes.
- A hit marks only the deepest matched grain; when a grain goes, its parent inherits the later last use and expiry.
  A grain with descendants is thus as young as its youngest descendant, without touching it on every hit.
- Only leaves stand in the queues for expiry and eviction. Queue items are refreshed when they reach the front.

Since there are no holes and a key names its whole past, the longest match is found by bisection. A grain whose
predecessor is not stored yet waits a bounded time for it (prefill and decode engines save independently). A stripe
whose last object has gone is listed by `freed` until its deletion is confirmed.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import sha256
from heapq import heapify, heappop, heappush
from itertools import islice

from shoal.kvstore.config import IndexConfig
from shoal.kvstore.core.orphans import Orphans, needed_key
from shoal.kvstore.core.records import IndexUsage, Kind, Located, Match, StripeRecord, TableEntry, TrafficClass


class _Grain:
    """One stored grain; `children` counts stored grains behind it."""

    __slots__ = (
        "anchor", "children", "created_us", "depth", "expires_us", "key", "last_use_us", "parent", "pins", "stripe",
        "traffic",
    )  # fmt: skip

    def __init__(self, entry: TableEntry, stripe: "_Stripe", parent: "_Grain | None", times: tuple[int, int]) -> None:
        self.key = entry.key
        self.parent = parent
        self.depth = entry.grain_index
        self.traffic = entry.traffic
        self.stripe = stripe
        self.anchor: _Stripe | None = None
        self.children: dict[bytes, _Grain] = {}
        self.pins = 0
        self.created_us, self.expires_us = times
        self.last_use_us = self.created_us

    def path(self) -> "list[_Grain]":
        """Grains from the first of the prompt to this one."""
        path: list[_Grain] = []
        at: _Grain | None = self
        while at is not None:
            path.append(at)
            at = at.parent
        return path[::-1]


class _Stripe:
    """A stripe and how many of its objects the index still offers or keeps waiting."""

    __slots__ = ("live", "record")

    def __init__(self, record: StripeRecord) -> None:
        self.record = record
        self.live = 0


def first_pin(boot_id: str) -> int:
    """Pins of this life are numbered from here: a release that was meant for an earlier life's pin finds none."""
    return int.from_bytes(sha256(boot_id.encode()).digest()[:5]) << 22  # room for 4 M pins in any quick succession


class StoreIndex:
    """The state machine. `now_us` must not run backwards; a smaller value is taken as the latest seen."""

    def __init__(self, config: IndexConfig, boot_id: str) -> None:
        self._config = config
        self._boot_id = boot_id
        self._now_us = 0
        self._grains: dict[bytes, _Grain] = {}
        self._stripes: dict[tuple[bytes, int], _Stripe] = {}
        self._freed: dict[tuple[bytes, int], StripeRecord] = {}
        self._orphans: Orphans[_Stripe] = Orphans(config.orphans_max, config.orphan_grace_us)
        self._expiry: list[tuple[int, int, bytes]] = []  # (expires, -depth, key) of leaves
        self._recency: list[tuple[int, int, bytes]] = []  # (last use, -depth, key) of leaves
        # Only first grains: none behind one is older, and past its age no match goes through it.
        self._ages: list[tuple[int, bytes]] = []  # (created, key)
        self._overdue: list[tuple[int, bytes]] = []  # past their age but pinned
        self._pins: dict[int, tuple[_Grain, str]] = {}
        self._pin_count = first_pin(boot_id)
        self._anchor_count = 0
        self._live_bytes = 0
        self._freed_bytes = 0

    def match(
        self, keys: Sequence[bytes], limit_tokens: int, now_us: int, traffic: TrafficClass | None = None
    ) -> Match:
        """Longest stored prefix of `keys` and the largest anchor in it at or below `limit_tokens`; refreshes it.

        O(log(keys) + grains between the match and its anchor). `traffic` is the class of the request that hits
        (None: the grain's own).
        """
        self.expire(now_us)
        deepest = self._deepest(keys)
        if deepest is None:
            return Match(0, 0, self._boot_id)
        self._touch(deepest, traffic)
        usable: _Grain | None = deepest
        limit = limit_tokens // self._config.grain_tokens
        while usable is not None and (usable.anchor is None or usable.depth >= limit):
            usable = usable.parent
        return Match(deepest.depth + 1, 0 if usable is None else usable.depth + 1, self._boot_id)

    def locate(self, keys: Sequence[bytes], owner: str, now_us: int) -> Located:
        """Pin the longest stored prefix of `keys` for `owner` and say where it lies; end it with `release`."""
        self.expire(now_us)
        deepest = self._deepest(keys)
        if deepest is None:
            return Located(0, (), (), (), (), self._boot_id)
        self._touch(deepest, None)
        self._pin_count += 1
        deepest.pins += 1
        self._pins[self._pin_count] = (deepest, owner)
        grains = deepest.path()
        anchors = [(count, grain.anchor) for count, grain in enumerate(grains, 1) if grain.anchor is not None]
        order = dict.fromkeys((*(g.stripe for g in grains), *(stripe for _, stripe in anchors)))
        places = {stripe: place for place, stripe in enumerate(order)}
        return Located(
            self._pin_count,
            tuple(places[grain.stripe] for grain in grains),
            tuple(count for count, _ in anchors),
            tuple(places[stripe] for _, stripe in anchors),
            tuple(stripe.record for stripe in order),
            self._boot_id,
        )

    def release(self, pin: int) -> bool:
        """End a pin; False if it is unknown (already released, or of an earlier boot)."""
        grain, _ = self._pins.pop(pin, (None, ""))
        if grain is None:
            return False
        assert grain.pins > 0, f"grain {grain.key.hex()} released more often than pinned"
        grain.pins -= 1
        self._queue_leaf(grain)
        while self._overdue:
            heappush(self._ages, self._overdue.pop())
        return True

    def owners(self) -> frozenset[str]:
        """Everybody who holds a pin."""
        return frozenset(name for _, name in self._pins.values())

    def release_owner(self, owner: str) -> int:
        """End every pin of an owner that is gone (its process ended, so no read of its can be under way)."""
        pins = [pin for pin, (_, name) in self._pins.items() if name == owner]
        return sum(self.release(pin) for pin in pins)

    def insert(self, record: StripeRecord, now_us: int) -> int:
        """Offer the objects of a durable stripe; returns how many are new. Evicts to hold the capacity.

        An object that is already stored keeps its first place; a repeated record changes nothing.
        """
        self.expire(now_us)
        name = (record.stripe_id, record.generation)
        if name in self._freed:
            return 0
        if name in self._stripes:
            self._complete(self._stripes[name], record)
            return 0
        stripe = self._stripes[name] = _Stripe(record)
        self._live_bytes += record.stored_bytes
        stripe.live += 1  # held while its objects are attached
        new = sum(self._attach(entry, stripe) for entry in sorted(record.table, key=lambda e: (e.grain_index, e.kind)))
        self._drop_object(stripe)
        self._evict()
        return new

    def missing(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored, so that an engine saves only what is new. Touches nothing."""
        return tuple(key not in self._grains for key in keys)

    def expire(self, now_us: int) -> int:
        """Forget what is past its time to live or maximum age; the number of grains. Amortised O(log n) a grain.

        Pinned grains, and those before them, stay until released and the next call.
        """
        self._now_us = now_us = max(self._now_us, now_us)
        gone = 0
        while self._ages and self._ages[0][0] + self._config.ttl.max_age_us <= now_us:
            created_us, key = heappop(self._ages)
            root = self._grains.get(key)
            if root is not None and root.created_us == created_us:
                gone += self._forget_behind(root)
                if self._grains.get(key) is root:
                    self._overdue.append((created_us, key))  # pinned: tried again after a release
        while self._expiry and self._expiry[0][0] <= now_us:
            gone += self._expire_leaf(heappop(self._expiry)[2])
        for orphan in self._orphans.take_due(now_us):
            self._drop_object(orphan.stripe)
        return gone

    def report_lost(self, stripe_id: bytes, generation: int) -> int:
        """Forget a stripe that cannot be decoded and every grain behind its grains; the number of grains forgotten.

        Pins do not keep it: its bytes are gone already. A pinned reader sees a shorter prefix.
        """
        stripe = self._stripes.get((stripe_id, generation))
        if stripe is None:
            return 0
        gone = 0
        for entry in stripe.record.table:
            grain = self._grains.get(entry.key)
            if grain is not None and entry.kind is Kind.ANCHOR and grain.anchor is stripe:
                self._drop_anchor(grain)
            elif grain is not None and entry.kind is Kind.GRAIN and grain.stripe is stripe:
                gone += self._forget_behind(grain, even_pinned=True)
            if self._orphans.take_object(entry, stripe) is not None:
                self._drop_object(stripe)
        return gone

    def freed(self, stripes_max: int) -> tuple[StripeRecord, ...]:
        """Stripes whose fragments may be deleted, oldest first; they stay listed until confirmed."""
        return tuple(islice(self._freed.values(), stripes_max))

    def confirm_deleted(self, names: Iterable[tuple[bytes, int]]) -> int:
        """Take (stripe id, generation) off the list of freed stripes; the number that were on it."""
        records = [record for record in (self._freed.pop(name, None) for name in names) if record is not None]
        self._freed_bytes -= sum(record.stored_bytes for record in records)
        return len(records)

    @property
    def usage(self) -> IndexUsage:
        """Counts and bytes now, O(1)."""
        return IndexUsage(
            len(self._grains), self._anchor_count, len(self._stripes), len(self._pins), len(self._orphans),
            self._live_bytes + self._freed_bytes, self._freed_bytes,
        )  # fmt: skip

    def _deepest(self, keys: Sequence[bytes]) -> _Grain | None:
        """The last stored grain of the longest stored prefix of `keys`; None when its first grain is past its age.

        A grain is never older than its parent, so the first one's age decides for all. Keys that are not one
        prompt's find nothing or an honest prompt's prefix, whose payloads are bound to other keys.
        """
        grains = self._grains
        first = grains.get(keys[0]) if keys else None
        if first is None or first.created_us + self._config.ttl.max_age_us <= self._now_us:
            return None
        stored = bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in grains)
        deepest = grains[keys[stored - 1]]
        return deepest if deepest.depth == stored - 1 else None

    def _touch(self, grain: _Grain, traffic: TrafficClass | None) -> None:
        grain.last_use_us = self._now_us
        ttl_us = self._config.ttl.of(traffic or grain.traffic)
        grain.expires_us = max(grain.expires_us, self._now_us + ttl_us)

    def _attach(self, entry: TableEntry, stripe: _Stripe) -> int:
        """Offer one object and everything that waited for it; how many are new."""
        if not self._can_attach(entry):
            waits = entry.key not in self._grains and self._orphans.add(entry, stripe, self._now_us)
            stripe.live += waits
            return 0
        new, ready, waited = 0, deque([(entry, stripe)]), list[_Stripe]()
        while ready:
            entry, stripe = ready.popleft()
            if not self._add(entry, stripe):
                continue
            new += 1
            if entry.kind is Kind.GRAIN:
                for orphan in self._orphans.take(entry.key):
                    ready.append((orphan.entry, orphan.stripe))
                    waited.append(orphan.stripe)
        for stripe in waited:
            self._drop_object(stripe)
        return new

    def _complete(self, stripe: _Stripe, record: StripeRecord) -> None:
        """Take a repeated record if it knows more fragments (recovery may see a stripe while it is written)."""
        if stripe.record.locations.count(None) > record.locations.count(None):
            self._live_bytes += record.stored_bytes - stripe.record.stored_bytes
            stripe.record = record

    def _can_attach(self, entry: TableEntry) -> bool:
        is_first = entry.kind is Kind.GRAIN and entry.grain_index == 0
        return is_first or needed_key(entry) in self._grains

    def _add(self, entry: TableEntry, stripe: _Stripe) -> bool:
        """Make one object part of the index; False when it is there already or contradicts its predecessor."""
        if entry.kind is Kind.ANCHOR:
            grain = self._grains[entry.key]
            if grain.anchor is not None:
                return False
            grain.anchor = stripe
            self._anchor_count += 1
        else:
            parent = None if entry.grain_index == 0 else self._grains[entry.parent]
            if entry.key in self._grains or (parent is not None and parent.depth + 1 != entry.grain_index):
                return False
            self._add_grain(entry, stripe, parent)
        stripe.live += 1
        return True

    def _add_grain(self, entry: TableEntry, stripe: _Stripe, parent: _Grain | None) -> None:
        now_us = self._now_us
        created_us = max(min(now_us, stripe.record.created_us), 0 if parent is None else parent.created_us)
        grain = _Grain(entry, stripe, parent, (created_us, now_us + self._config.ttl.of(entry.traffic)))
        self._grains[entry.key] = grain
        if parent is None:
            heappush(self._ages, (created_us, entry.key))
        else:
            parent.children[entry.key] = grain
        self._queue_leaf(grain)

    def _queue_leaf(self, grain: _Grain) -> None:
        if not grain.children and not grain.pins and self._grains.get(grain.key) is grain:
            heappush(self._expiry, (grain.expires_us, -grain.depth, grain.key))
            heappush(self._recency, (grain.last_use_us, -grain.depth, grain.key))
            self._compact_queues()

    def _compact_queues(self) -> None:
        """Rebuild a queue that is mostly stale items; amortised O(1) a push."""
        if len(self._recency) > 64 + 4 * len(self._grains):
            leaves = [g for g in self._grains.values() if not g.children and not g.pins]
            self._recency = [(g.last_use_us, -g.depth, g.key) for g in leaves]
            self._expiry = [(g.expires_us, -g.depth, g.key) for g in leaves]
            heapify(self._recency)
            heapify(self._expiry)

    def _expire_leaf(self, key: bytes) -> int:
        """Forget a leaf that is due; a refreshed one goes back to its true place in the queue."""
        grain = self._grains.get(key)
        if grain is None or grain.children or grain.pins:
            return 0  # stale item: the grain returns to the queues when it is a free leaf again
        if grain.expires_us > self._now_us:
            heappush(self._expiry, (grain.expires_us, -grain.depth, key))
            return 0
        self._forget(grain)
        return 1

    def _evict(self) -> None:
        """Forget least recently used leaves, deepest first, until the live stripes fit the capacity."""
        while self._live_bytes > self._config.capacity_bytes and self._recency:
            last_use_us, _, key = heappop(self._recency)
            grain = self._grains.get(key)
            if grain is None or grain.children or grain.pins:
                continue
            if grain.last_use_us != last_use_us:
                heappush(self._recency, (grain.last_use_us, -grain.depth, key))
                continue
            self._forget(grain)

    def _forget_behind(self, grain: _Grain, even_pinned: bool = False) -> int:
        """Forget a grain and all behind it, children first; pinned ones and those before them stay unless told."""
        order, at = [grain], 0
        while at < len(order):
            order.extend(order[at].children.values())
            at += 1
        gone = 0
        for item in reversed(order):
            if not item.children and (even_pinned or not item.pins):
                self._forget(item)
                gone += 1
        return gone

    def _forget(self, grain: _Grain) -> None:
        assert not grain.children, f"grain {grain.key.hex()} goes before {len(grain.children)} behind it"
        del self._grains[grain.key]
        if grain.anchor is not None:
            self._drop_anchor(grain)
        parent = grain.parent
        if parent is not None:
            del parent.children[grain.key]
            parent.last_use_us = max(parent.last_use_us, grain.last_use_us)
            parent.expires_us = max(parent.expires_us, grain.expires_us)
            self._queue_leaf(parent)
        self._drop_object(grain.stripe)

    def _drop_anchor(self, grain: _Grain) -> None:
        stripe, grain.anchor = grain.anchor, None
        assert stripe is not None
        self._anchor_count -= 1
        self._drop_object(stripe)

    def _drop_object(self, stripe: _Stripe) -> None:
        stripe.live -= 1
        assert stripe.live >= 0, f"stripe {stripe.record.stripe_id.hex()} lost more objects than it has"
        if stripe.live == 0:
            record = stripe.record
            del self._stripes[record.stripe_id, record.generation]
            self._freed[record.stripe_id, record.generation] = record
            self._live_bytes -= record.stored_bytes
            self._freed_bytes += record.stored_bytes
