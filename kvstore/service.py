"""The index as a service: one lock around the pure index, a clock, and the bookkeeping of who holds pins."""

from collections.abc import Callable, Sequence
from threading import Lock

from shoal.kvstore.config import IndexConfig
from shoal.kvstore.core.index import StoreIndex
from shoal.kvstore.core.records import IndexUsage, Located, Match, StripeRecord, TrafficClass


class IndexService:
    """Plain calls with picklable values over a StoreIndex, to be wrapped by an actor or called in process."""

    def __init__(self, config: IndexConfig, boot_id: str, clock_us: Callable[[], int]) -> None:
        """`boot_id` must differ at every start; `clock_us` is wall time in microseconds (stripe heads carry it)."""
        self._index = StoreIndex(config, boot_id)
        self._clock_us = clock_us
        self._lock = Lock()

    def match(self, keys: Sequence[bytes], limit_tokens: int, traffic: TrafficClass | None = None) -> Match:
        """Longest stored prefix of `keys` and its largest anchor at or below `limit_tokens`; refreshes it."""
        with self._lock:
            return self._index.match(keys, limit_tokens, self._clock_us(), traffic)

    def missing(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        """Per key: True when the grain is not stored."""
        with self._lock:
            return self._index.missing(keys)

    def locate(self, keys: Sequence[bytes], owner: str, hold_us: int) -> Located:
        """Pin the longest stored prefix of `keys` for `owner`, at most `hold_us`, and say where it lies."""
        with self._lock:
            return self._index.locate(keys, owner, hold_us, self._clock_us())

    def release(self, pin: int) -> bool:
        """End a pin; False if unknown."""
        with self._lock:
            return self._index.release(pin)

    def owners(self) -> frozenset[str]:
        """Everybody who holds a pin."""
        with self._lock:
            return self._index.owners()

    def release_owner(self, owner: str) -> int:
        """End every pin of a process that is gone."""
        with self._lock:
            return self._index.release_owner(owner)

    def insert(self, record: StripeRecord) -> int:
        """Offer the objects of a durable stripe; the number that are new."""
        with self._lock:
            return self._index.insert(record, self._clock_us())

    def report_lost(self, stripe_id: bytes, generation: int) -> int:
        """Forget a stripe that cannot be decoded; the number of grains forgotten."""
        with self._lock:
            return self._index.report_lost(stripe_id, generation)

    def expire(self) -> int:
        """Forget what is past its time; the number of grains."""
        with self._lock:
            return self._index.expire(self._clock_us())

    def freed(self, stripes_max: int) -> tuple[StripeRecord, ...]:
        """Stripes whose fragments may be deleted."""
        with self._lock:
            return self._index.freed(stripes_max)

    def confirm_deleted(self, names: Sequence[tuple[bytes, int]]) -> int:
        """Take stripes off the list of freed ones."""
        with self._lock:
            return self._index.confirm_deleted(names)

    def usage(self) -> IndexUsage:
        """Counts and bytes now."""
        with self._lock:
            return self._index.usage
