"""The store's policy on whole chains: recency, sliding or fixed time to live by class, age, quota, admission, pins.

Tail-first order keeps what is resident a set of prefixes without holes: every use of a grain uses all grains before
it, so within an entry of the log the deepest goes first, and no grain behind it was used later. What a touch means:

- LRU: after any sequence of references the cache holds the most recently used distinct grains, so the whole chain may
  be marked first and the oldest marks evicted afterwards; one by one gives the same.
- `HEAD_FIRST` marks the head of the chain as its oldest part, as a cache of single objects does; the heads go first
  and strand the tails. Looking up and inserting block by block finds the same leading hits, and no other hit: the
  next grain was last used right after this one, so if this one has gone, as many others have come after the next.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from shoal.kvstore.core.policy.logs import Ages, ChainLog, Marks, lengthen
from shoal.kvstore.core.policy.verbs import NOBODY, Chain, Flags, Served, joined, leading
from shoal.kvstore.errors import ConfigError


class Order(StrEnum):
    """Which end of a chain is its least recently used part."""

    TAIL_FIRST = "tail_first"
    HEAD_FIRST = "head_first"


@dataclass(frozen=True, slots=True)
class ChainRules:
    """What a `ChainPolicy` keeps. Every rule may be absent (None or empty), which means no such limit.

    `capacity` in grains; `ttl_us` by class number (a request's `traffic`), refreshed on use unless `refresh` is off;
    a grain lives as long as the longest promise any use gave it and is alive at the very microsecond it ends;
    `age_max_us` since its first grain was written; `quotas` of grains by tenant number; `second_touch_us`: a grain is
    stored only if it was asked for before within this time. Tenants must not share grains (chain keys are salted).
    """

    capacity: int | None = None
    order: Order = Order.TAIL_FIRST
    ttl_us: tuple[int, ...] = ()
    refresh: bool = True
    age_max_us: int | None = None
    quotas: tuple[int, ...] = ()
    second_touch_us: int | None = None

    def __post_init__(self) -> None:
        numbers = [("capacity", self.capacity), ("second_touch_us", self.second_touch_us)]
        numbers += [("quotas", value) for value in self.quotas]
        lives = [("age_max_us", self.age_max_us), *(("ttl_us", value) for value in self.ttl_us)]
        for name, value in numbers:
            if value is not None and value < 1:
                raise ConfigError(f"policy.{name}", value, "must be positive", "leave it out for no limit")
        for name, value in lives:
            if value is not None and value < 0:
                raise ConfigError(f"policy.{name}", value, "must not be negative", "leave it out for no limit")
        holes = self.age_max_us is not None or self.second_touch_us is not None or bool(self.quotas)
        if self.order is Order.HEAD_FIRST and holes:
            rule = "leaves holes, so it cannot stand beside an age, a quota or second touch"
            raise ConfigError("policy.order", self.order.value, rule, "use tail_first")


class ChainPolicy:
    """The policy machine of `ChainRules`; see `Policy` for its verbs. O(chain) vector work a verb, whatever is stored.

    Memory: 8 bytes a possible grain, 8 more with a time to live, 4 with an age, 8 with second touch, 4 with quotas, 4
    once something is pinned, and at most about 8 bytes of log a resident grain for each of recency and expiry.
    """

    def __init__(self, rules: ChainRules, grains_max: int) -> None:
        self._rules = rules
        self._grains_max = grains_max
        self._serial = 0
        self._serial_of: Marks = np.zeros(grains_max, np.int64)  # of the last use; 0: absent
        self._due_of: Marks = np.full(grains_max if rules.ttl_us else 0, -1, np.int64)
        self._seen_us: Marks = np.full(grains_max if rules.second_touch_us else 0, -1, np.int64)
        self._expiry = [ChainLog(self._due_of) for _ in rules.ttl_us]
        self._ages = Ages(grains_max, self._serial_of) if rules.age_max_us is not None else None
        self._tenant_of = np.zeros(grains_max if rules.quotas else 0, np.int32)
        self._held = [0] * len(rules.quotas)
        ranked = rules.capacity is not None or bool(rules.quotas)
        self._recency = [ChainLog(self._serial_of) for _ in range(max(1, len(rules.quotas)))] if ranked else []
        self._pins: dict[int, tuple[Chain, int, int]] = {}
        self._pin_count = 0
        self._pins_of = np.zeros(0, np.int32)
        self._overdue: list[int] = []  # first grains past their age but pinned
        self._late: list[Chain] = []  # released after their time had come
        self._live = 0
        self._area = 0  # resident grains times microseconds
        self._clock_us: int | None = None

    @property
    def live(self) -> int:
        """Resident grains."""
        return self._live

    @property
    def grain_microseconds(self) -> int:
        """Sum over time of the resident grains, up to the latest `expire`; each grain counts until it was due."""
        return self._area

    @property
    def tracked_bytes(self) -> int:
        """Bytes of all arrays and logs (Python's own objects for log entries at 120 bytes each)."""
        arrays = (self._serial_of, self._due_of, self._seen_us, self._tenant_of, self._pins_of)
        logs = (*self._expiry, *self._recency)
        ages = 0 if self._ages is None else 4 * self._grains_max
        return sum(a.nbytes for a in arrays) + sum(4 * log.places + 120 * len(log) for log in logs) + ages

    def reserve(self, grains_max: int) -> None:
        """Room for ids up to `grains_max`, which must not shrink. O(grains_max)."""
        assert grains_max >= self._grains_max, f"{grains_max} ids are fewer than the {self._grains_max} there are"
        self._grains_max = grains_max
        lengthen(self._serial_of, grains_max, 0)
        if self._rules.ttl_us:
            lengthen(self._due_of, grains_max, -1)
        if self._rules.second_touch_us:
            lengthen(self._seen_us, grains_max, -1)
        if self._rules.quotas:
            lengthen(self._tenant_of, grains_max, 0)
        if len(self._pins_of):
            lengthen(self._pins_of, grains_max, 0)
        if self._ages is not None:
            self._ages.reserve(grains_max)

    def lookup(self, chain: Chain, now_us: int) -> int:
        """Leading resident grains of the chain at this time; changes nothing."""
        if not len(chain) or self._is_aged(chain, now_us):
            return 0
        present = self._serial_of[chain] > 0
        if self._rules.ttl_us:
            present &= (self._due_of[chain] >= now_us) | self._pinned(chain)
        return leading(present)

    def touch(self, chain: Chain, now_us: int, traffic: int = 0, tenant: int = 0) -> None:
        """A read used these resident grains (a leading part of a chain)."""
        if len(chain):
            assert (self._serial_of[chain] > 0).all(), "a touched grain is not resident: insert it"
            self._write(chain, None, now_us, traffic, tenant)

    def insert(self, chain: Chain, now_us: int, traffic: int = 0, tenant: int = 0, born_us: int | None = None) -> Chain:
        """A whole chain was written: absent grains become resident, resident ones are used. Returns evicted ids.

        `born_us`: when the first grain was written, if it is absent (None: now).
        """
        gone = self._expire(now_us)
        if len(chain):
            gone += self._insert(chain, self._serial_of[chain] == 0, now_us, traffic, tenant, born_us)
        return joined(gone)

    def serve(self, chain: Chain, now_us: int, traffic: int = 0, tenant: int = 0) -> Served:
        """One request of a replay: expire, look up, then write the whole chain."""
        self._expire(now_us)
        if not len(chain):
            return Served(0, 0)
        absent = self._serial_of[chain] == 0
        missing = int(np.count_nonzero(absent))
        hits = int(absent.argmax()) if missing else len(chain)
        aged = self._is_aged(chain, now_us)
        self._insert(chain, absent, now_us, traffic, tenant)
        return Served(0 if aged else hits, len(chain) - missing)

    def evict(self, count: int) -> Chain:
        """Let at least `count` grains go if that many may go; returns their ids."""
        gone: list[Chain] = []
        while count > 0 and (lane := self._oldest_lane()) is not None:
            ids = self._evict_from(lane, count)
            count -= len(ids)
            gone.append(ids)
        return joined(gone)

    def expire(self, now_us: int) -> Chain:
        """Let go of what is past its time; returns the ids."""
        return joined(self._expire(now_us))

    def pin(self, chain: Chain, traffic: int = 0, tenant: int = 0) -> int:
        """Keep these resident grains (a leading part of a chain) until `release`; the number to end it with."""
        assert (self._serial_of[chain] > 0).all(), "a pinned grain is not resident: look it up first"
        if not len(self._pins_of):
            self._pins_of = np.zeros(self._grains_max, np.int32)
        self._pin_count += 1
        self._pins_of[chain] += 1
        self._pins[self._pin_count] = (chain, traffic, tenant)
        return self._pin_count

    def release(self, pin: int, now_us: int) -> bool:
        """End a pin; its completion is a use of its grains. False if it is unknown (already released).

        Grains whose time came meanwhile go with the next `expire`.
        """
        held = self._pins.pop(pin, None)
        if held is None:
            return False
        chain, traffic, tenant = held
        self._pins_of[chain] -= 1
        if len(chain):
            self._write(chain, None, now_us, traffic, tenant)
        if self._rules.ttl_us and not self._rules.refresh:
            self._late.append(chain)
        overdue, self._overdue = self._overdue, []
        for first in overdue:
            assert self._ages is not None
            self._ages.ask_again(first)
        return True

    def forget(self, ids: Chain) -> None:
        """These resident grains are gone, pinned or not, and all behind them; a pin keeps what is before them."""
        if self._pinned(ids).any():
            for pin, (chain, traffic, tenant) in self._pins.items():
                self._pins[pin] = (chain[: leading(~np.isin(chain, ids))], traffic, tenant)
            self._pins_of[ids] = 0
        self._drop(ids, 0)

    def _insert(
        self, chain: Chain, absent: Flags, now_us: int, traffic: int, tenant: int, born_us: int | None = None
    ) -> list[Chain]:
        window_us = self._rules.second_touch_us
        if window_us is not None:
            seen = self._seen_us[chain]
            self._seen_us[chain] = now_us
            admitted = leading(~absent | ((seen >= 0) & (seen >= now_us - window_us)))
            chain, absent = chain[:admitted], absent[:admitted]
            if not admitted:
                return []
        self._write(chain, absent, now_us, traffic, tenant)
        if self._ages is not None and absent.any():
            self._ages.add(int(chain[0]), chain[absent], now_us if born_us is None else born_us)
        return self._make_room(tenant)

    def _write(self, chain: Chain, absent: Flags | None, now_us: int, traffic: int, tenant: int) -> None:
        self._serial += 1
        self._serial_of[chain] = self._serial
        fresh = NOBODY if absent is None else chain[absent]
        self._live += len(fresh)
        if self._expiry:
            self._promise(chain, fresh, now_us, traffic)
        if self._held:
            self._tenant_of[fresh] = tenant
            self._held[tenant] += len(fresh)
        if self._recency:
            self._recency[tenant if self._held else 0].append(self._serial, chain)

    def _promise(self, chain: Chain, fresh: Chain, now_us: int, traffic: int) -> None:
        due_us = now_us + self._rules.ttl_us[traffic]
        if not self._rules.refresh:
            chain = fresh
        elif len(self._expiry) > 1:
            chain = chain[self._due_of[chain] < due_us]
        if len(chain):
            self._due_of[chain] = due_us
            self._expiry[traffic].append(due_us, chain)

    def _make_room(self, tenant: int) -> list[Chain]:
        gone: list[Chain] = []
        while self._held and self._held[tenant] > self._rules.quotas[tenant] and len(self._recency[tenant]):
            gone.append(self._evict_from(self._recency[tenant], self._held[tenant] - self._rules.quotas[tenant]))
        capacity = self._rules.capacity
        if capacity is not None and self._live > capacity:
            gone.append(self.evict(self._live - capacity))
        return gone

    def _oldest_lane(self) -> ChainLog | None:
        filled = [lane for lane in self._recency if len(lane)]
        return min(filled, key=lambda lane: lane.oldest) if filled else None

    def _evict_from(self, lane: ChainLog, count: int) -> Chain:
        """Let at most `count` grains of the oldest entry go; pinned ones return to the log when released."""
        mark = lane.oldest
        ids = lane.take()
        if len(self._pins_of):
            ids = ids[self._pins_of[ids] == 0]
        if len(ids) > count:
            cut = len(ids) - count
            if self._rules.order is Order.TAIL_FIRST:
                kept, ids = ids[:cut], ids[cut:]
            else:
                ids, kept = ids[:count], ids[count:]
            lane.give_back(mark, kept)
        self._drop(ids, 0)
        return ids

    def _expire(self, now_us: int) -> list[Chain]:
        clock_us = now_us if self._clock_us is None else self._clock_us
        assert now_us >= clock_us, f"now_us = {now_us} runs backwards from {clock_us}"
        self._area += self._live * (now_us - clock_us)
        self._clock_us = now_us
        gone: list[Chain] = []
        late, self._late = self._late, []
        for ids in late:
            ids = ids[(self._serial_of[ids] > 0) & (self._due_of[ids] < now_us) & ~self._pinned(ids)]
            self._drop(ids, 0)
            gone.append(ids)
        for log in self._expiry:
            while len(log) and (due_us := log.oldest) < now_us:
                ids = log.take()
                if len(self._pins_of):
                    ids = ids[self._pins_of[ids] == 0]
                self._drop(ids, now_us - max(due_us, clock_us))
                gone.append(ids)
        if self._ages is not None and self._rules.age_max_us is not None:
            gone += [self._drop_aged(ids) for ids in self._ages.take_due(now_us - self._rules.age_max_us)]
        return gone

    def _drop(self, ids: Chain, late_us: int) -> None:
        if not len(ids):
            return
        self._live -= len(ids)
        self._area -= late_us * len(ids)
        self._serial_of[ids] = 0
        if self._expiry:
            self._due_of[ids] = -1
        if self._held:
            for tenant, count in enumerate(np.bincount(self._tenant_of[ids], minlength=len(self._held)).tolist()):
                self._held[tenant] -= count
        if self._ages is not None:
            self._ages.forget(ids)

    def _drop_aged(self, ids: Chain) -> Chain:
        pinned = self._pinned(ids)
        if pinned.any() and self._ages is not None:
            self._overdue += self._ages.firsts(ids[pinned])
            ids = ids[~pinned]
        self._drop(ids, 0)
        return ids

    def _pinned(self, ids: Chain) -> Flags:
        return self._pins_of[ids] > 0 if len(self._pins_of) else np.zeros(len(ids), np.bool_)

    def _is_aged(self, chain: Chain, now_us: int) -> bool:
        if self._ages is None or self._rules.age_max_us is None:
            return False
        born = self._ages.born(int(chain[0]))
        return born >= 0 and born + self._rules.age_max_us < now_us
