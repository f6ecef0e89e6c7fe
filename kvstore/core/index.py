"""The index: which grains and anchors are stored, where, how recently used and pinned; pure, no clock, no I/O.

What stays and what goes is said by a policy of `kvstore/core/policy`, the one that replays run: this machine knows
keys, stripes and anchors, tells the policy of whole prefixes (by number), and forgets what the policy lets go, always
with all that stands behind it. What is stored is thus a set of prefixes without holes.

Since there are no holes and a key names its whole past, the longest match is found by bisection. A grain whose
predecessor is not stored yet waits a bounded time for it (prefill and decode engines save independently). A stripe
whose last object has gone is listed by `freed` until its deletion is confirmed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from shoal.kvstore.config import IndexConfig, Stay
from shoal.kvstore.core.grains import NONE, Grains
from shoal.kvstore.core.orphans import Orphans, needed_key
from shoal.kvstore.core.pins import Pins
from shoal.kvstore.core.policy.chained import ChainPolicy, ChainRules
from shoal.kvstore.core.policy.verbs import NOBODY, Chain
from shoal.kvstore.core.records import IndexUsage, Kind, Located, Match, StripeRecord, TableEntry, TrafficClass

CLASSES = tuple(TrafficClass)  # a class's number in the policy is its place here
_NO_LIMIT = 1 << 62  # grains: the policy keeps an order to evict by, and bytes say when


def rules_of(config: IndexConfig) -> ChainRules:
    """The policy that a configuration asks for.

    A policy's grain is alive at the microsecond its time ends, an index's is not: its times are one shorter.
    """
    lives = () if config.stay is Stay.LRU else tuple(config.ttl.of(traffic) - 1 for traffic in CLASSES)
    refresh, age_max_us = config.stay is not Stay.FIXED, config.ttl.max_age_us - 1
    return ChainRules(capacity=_NO_LIMIT, ttl_us=lives, refresh=refresh, age_max_us=age_max_us)


class _Stripe:
    """A stripe and how many of its objects the index still offers or keeps waiting."""

    __slots__ = ("live", "record")

    def __init__(self, record: StripeRecord) -> None:
        self.record = record
        self.live = 0


class StoreIndex:
    """The state machine. `now_us` must not run backwards; a smaller value is taken as the latest seen."""

    def __init__(self, config: IndexConfig, boot_id: str) -> None:
        self._config = config
        self._boot_id = boot_id
        self._now_us = 0
        self._grains: Grains[_Stripe] = Grains()
        self._room = self._grains.limit
        self._policy = ChainPolicy(rules_of(config), self._room)
        self._stripes: dict[tuple[bytes, int], _Stripe] = {}
        self._freed: dict[tuple[bytes, int], StripeRecord] = {}
        self._orphans: Orphans[_Stripe] = Orphans(config.orphans_max, config.orphan_grace_us)
        self._pins: Pins[int] = Pins(boot_id)  # over pins of the policy
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
        chain = self._prefix(keys)
        if not len(chain):
            return Match(0, 0, self._boot_id)
        self._policy.touch(chain, self._now_us, self._class(chain, traffic))
        anchored = self._grains.anchored(chain[: max(0, limit_tokens) // self._config.grain_tokens])
        return Match(len(chain), anchored[-1] + 1 if anchored else 0, self._boot_id)

    def locate(self, keys: Sequence[bytes], owner: str, hold_us: int, now_us: int) -> Located:
        """Pin the longest stored prefix of `keys` for `owner` and say where it lies; end it with `release`.

        A pin nobody releases ends after `hold_us`: by then its reader has given up.
        """
        self.expire(now_us)
        chain = self._prefix(keys)
        if not len(chain):
            return Located(0, (), (), (), (), self._boot_id)
        traffic = self._class(chain, None)
        self._policy.touch(chain, self._now_us, traffic)
        pin = self._pins.add(self._policy.pin(chain, traffic), owner, self._now_us, hold_us)
        grains = chain.tolist()
        stripes = [self._grains.stripe_of(grain) for grain in grains]
        anchors = [(at + 1, self._grains.anchors[grains[at]]) for at in self._grains.anchored(chain)]
        order = dict.fromkeys((*stripes, *(stripe for _, stripe in anchors)))
        places = {stripe: place for place, stripe in enumerate(order)}
        return Located(
            pin,
            tuple(places[stripe] for stripe in stripes),
            tuple(count for count, _ in anchors),
            tuple(places[stripe] for _, stripe in anchors),
            tuple(stripe.record for stripe in order),
            self._boot_id,
        )

    def release(self, pin: int) -> bool:
        """End a pin; False if it is unknown (already ended, or of an earlier boot). Its end is a use of its grains."""
        held = self._pins.release(pin)
        return held is not None and self._policy.release(held, self._now_us)

    def owners(self) -> frozenset[str]:
        """Everybody who holds a pin."""
        return self._pins.owners()

    def release_owner(self, owner: str) -> int:
        """End every pin of an owner that is gone (its process ended, so no read of its can be under way)."""
        return sum(self.release(pin) for pin in self._pins.of(owner))

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
        objects, grains = 0, list[int]()
        for entry in sorted(record.table, key=lambda e: (e.grain_index, e.kind)):
            objects += self._attach(entry, stripe, grains)
        self._admit(grains, record.created_us)
        self._drop_object(stripe)
        self._evict()
        return objects

    def missing(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored, so that an engine saves only what is new. Touches nothing."""
        return tuple(key not in self._grains for key in keys)

    def expire(self, now_us: int) -> int:
        """Forget what is past its time to live or maximum age; the number of grains. Amortised O(1) a reference.

        Pins past their end are released first. Pinned grains, and those before them, stay until released and the
        next call.
        """
        self._now_us = now_us = max(self._now_us, now_us)
        for pin in self._pins.overdue(now_us):
            self.release(pin)
        gone = self._remove(self._policy.expire(now_us))
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
        lost = []
        for entry in stripe.record.table:
            grain = self._grains.find(entry.key)
            if entry.kind is Kind.ANCHOR and self._grains.anchors.get(grain) is stripe:
                self._drop_anchor(grain)
            elif entry.kind is Kind.GRAIN and grain != NONE and self._grains.stripe_of(grain) is stripe:
                lost.append(grain)
            if self._orphans.take_object(entry, stripe) is not None:
                self._drop_object(stripe)
        behind = self._grains.behind(lost)
        self._policy.forget(np.array(behind, np.int32))
        self._forget(behind)
        return len(behind)

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
            len(self._grains), len(self._grains.anchors), len(self._stripes), len(self._pins), len(self._orphans),
            self._live_bytes + self._freed_bytes, self._freed_bytes,
        )  # fmt: skip

    def _prefix(self, keys: Sequence[bytes]) -> Chain:
        """Numbers of the longest stored prefix that may still be offered."""
        deepest = self._grains.deepest(keys)
        if deepest == NONE:
            return NOBODY
        chain = self._grains.chain(deepest)
        return chain[: self._policy.lookup(chain, self._now_us)]

    def _class(self, chain: Chain, traffic: TrafficClass | None) -> int:
        """Class number of a hit: the request's, else that of the deepest grain."""
        return self._grains.traffic[chain[-1]] if traffic is None else CLASSES.index(traffic)

    def _attach(self, entry: TableEntry, stripe: _Stripe, grains: list[int]) -> int:
        """Offer one object and everything that waited for it; how many are new. New grains are added to `grains`."""
        if not self._can_attach(entry):
            waits = entry.key not in self._grains and self._orphans.add(entry, stripe, self._now_us)
            stripe.live += waits
            return 0
        new, ready, waited = 0, deque([(entry, stripe)]), list[_Stripe]()
        while ready:
            entry, stripe = ready.popleft()
            if not self._add(entry, stripe, grains):
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

    def _add(self, entry: TableEntry, stripe: _Stripe, grains: list[int]) -> bool:
        """Make one object part of the index; False when it is there already or contradicts its predecessor."""
        grain = self._grains.find(entry.key)
        if entry.kind is Kind.ANCHOR:
            if grain in self._grains.anchors:
                return False
            self._grains.set_anchor(grain, stripe)
        else:
            parent = NONE if entry.grain_index == 0 else self._grains.find(entry.parent)
            if grain != NONE or (parent != NONE and self._grains.depth(parent) + 1 != entry.grain_index):
                return False
            grains.append(self._grains.add(entry.key, parent, CLASSES.index(entry.traffic), stripe))
        stripe.live += 1
        return True

    def _admit(self, grains: Sequence[int], created_us: int) -> None:
        """Tell the policy of new grains: one chain for each that no new grain of its class stands behind."""
        if self._grains.limit > self._room:
            self._room = self._grains.limit
            self._policy.reserve(self._room)
        parent, traffic = self._grains.parent, self._grains.traffic
        behind = [(parent(grain), grain) for grain in grains if parent(grain) != NONE]
        covered = {before for before, grain in behind if traffic[before] == traffic[grain]}
        for grain in grains:
            if grain not in covered:
                chain = self._grains.chain(grain)
                gone = self._policy.insert(chain, self._now_us, traffic[grain], born_us=min(self._now_us, created_us))
                assert not len(gone), f"{len(gone)} grains went to make room, which only bytes decide"

    def _evict(self) -> None:
        """Let the policy's next go until the live stripes fit the capacity, or all that is left is pinned."""
        while self._live_bytes > self._config.capacity_bytes and self._remove(self._policy.evict(1)):
            pass

    def _remove(self, gone: Chain) -> int:
        """Forget what the policy let go, and what that leaves without a predecessor; how many."""
        if not len(gone):
            return 0
        known = gone.tolist()
        behind = self._grains.behind(known)
        if len(behind) > len(known):
            self._policy.forget(np.array(behind[len(known) :], np.int32))
        self._forget(behind)
        return len(behind)

    def _forget(self, grains: Sequence[int]) -> None:
        for grain in grains:
            self._drop_anchor(grain)
            self._drop_object(self._grains.remove(grain))

    def _drop_anchor(self, grain: int) -> None:
        stripe = self._grains.take_anchor(grain)
        if stripe is not None:
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
