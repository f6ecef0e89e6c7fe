"""Fetch a pinned prefix: k+1 fragments of each stripe at once, the rest on failure or slowness, any k decode.

Stripes are read in prompt order, a bounded number at a time. Everything ends by the deadline or by cancellation; a
stripe that cannot be had shortens the prefix, it never raises and never yields bytes that were not verified.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Erased, Kind, Location, Miss, StripeRecord
from shoal.kvstore.core.stripe import Allocate, Checksums, Code, Gathering
from shoal.kvstore.ports import NodePort, Reply, failure_of

Read = Future[Reply[bytes | memoryview | Erased]]
Objects = Mapping[tuple[Kind, bytes], memoryview | Miss]
# A cancelled fetch notices within this time even if no fragment answers.
CANCEL_POLL_US = 20_000


@dataclass(frozen=True, slots=True)
class Limits:
    """When one fetch must end: at `deadline_us` of the client's clock, or when `cancelled` is set."""

    deadline_us: int
    cancelled: Event


@dataclass(frozen=True, slots=True)
class StripeLost:
    """A stripe with fewer than k good fragments, all asked. `is_certain`: the unreachable ones would not help.

    An uncertain loss is a miss now and may be a hit later; only a certain one may make the index forget.
    """

    record: StripeRecord
    is_certain: bool
    reasons: tuple[str, ...]


class _StripeRead:
    """One stripe on its way: which fragments were asked, which counted, and why others did not."""

    def __init__(
        self, record: StripeRecord, code: Code, sums: Checksums, started_us: int, arrived: SimpleQueue[Read]
    ) -> None:
        self.record = record
        self.started_us = started_us
        self.arrived = arrived
        self.gathering = Gathering(record.stripe_id, record.generation, (record.data, record.parity), code, sums)
        self.pending: dict[Read, int] = {}
        self.unreachable = 0
        held = [index for index, place in enumerate(record.locations) if place is not None]
        # Data fragments first: they need no arithmetic. Which parity comes first differs from stripe to stripe.
        turn = record.stripe_id[0] % max(1, record.parity)
        parity = [index for index in held if index >= record.data]
        self.unasked = [index for index in held if index < record.data] + parity[turn:] + parity[:turn]
        self.reasons = [
            f"fragment {index}: not stored" for index, place in enumerate(record.locations) if place is None
        ]

    @property
    def is_lost(self) -> bool:
        """Nothing left to hope for."""
        return not self.pending and not self.unasked and not self.gathering.is_ready

    def take(self, future: Read) -> None:
        """Count one answer; any failure is an erasure."""
        index = self.pending.pop(future)
        failure = failure_of(future)
        if failure is not None:
            self.unreachable += 1
            self.reasons.append(f"fragment {index}: {failure}")
            return
        answer = future.result().value
        erased = answer if isinstance(answer, Erased) else self.gathering.offer(index, answer, is_summed=True)
        if erased is not None:
            self.reasons.append(f"fragment {index}: {erased.reason}")

    def abandon(self) -> None:
        """Stop waiting; answers still to come are dropped by whoever sends them."""
        for future in self.pending:
            future.cancel()


class StripeReader:
    """Reads stripes over nodes. Stateless between calls, so any number of threads may share it."""

    def __init__(
        self,
        world: tuple[Mapping[str, NodePort], Allocate],
        config: StoreConfig,
        code: Code,
        sums: Checksums,
        clock_us: Callable[[], int],
    ) -> None:
        """`world` is the nodes by name and where memory for decoded stripes comes from."""
        self._nodes, self._allocate = world
        self._config = config
        self._code = code
        self._sums = sums
        self._clock_us = clock_us
        self._node_of = {device.name: device.node for device in config.devices}

    def read(self, records: Sequence[StripeRecord], limits: Limits) -> list[Objects | StripeLost | Miss]:
        """Objects of each stripe in order, up to and including the first that cannot be had.

        StripeLost: all answered and too few verify. Miss: the deadline or a cancellation came first.
        """
        results: list[Objects | StripeLost | Miss] = []
        window: list[_StripeRead] = []
        arrived: SimpleQueue[Read] = SimpleQueue()  # one place to wait at, however many answers are due
        rest = list(reversed(records))
        try:
            while window or rest:
                while rest and len(window) < self._config.fetch_window_stripes:
                    window.append(self._start(rest.pop(), arrived))
                outcome = self._finish(window[0], window, limits)
                results.append(outcome)
                if isinstance(outcome, StripeLost | Miss):
                    break
                window.pop(0)
        finally:
            for stripe in window:
                stripe.abandon()
        return results

    def _start(self, record: StripeRecord, arrived: SimpleQueue[Read]) -> _StripeRead:
        stripe = _StripeRead(record, self._code, self._sums, self._clock_us(), arrived)
        self._ask(stripe, self._config.code.ask)
        return stripe

    def _finish(self, first: _StripeRead, window: list[_StripeRead], limits: Limits) -> Objects | StripeLost | Miss:
        """Drive every stripe of the window until the first one is decoded or given up."""
        while (objects := self._decoded(first)) is None:
            if first.is_lost:
                is_certain = first.gathering.count + first.unreachable < first.record.data
                return StripeLost(first.record, is_certain, tuple(first.reasons))
            now_us = self._clock_us()
            if limits.cancelled.is_set() or now_us >= limits.deadline_us:
                why = "cancelled" if limits.cancelled.is_set() else "deadline"
                return Miss(f"{why} while stripe {first.record.stripe_id.hex()} was read: {first.reasons}")
            patience_us = min(limits.deadline_us - now_us, CANCEL_POLL_US, self._config.slow_us)
            done = _answers(first.arrived, max(patience_us, 0) / 1e6)
            for stripe in window:
                for future in done:
                    if future in stripe.pending:
                        stripe.take(future)
                self._ask_more(stripe)
        return objects

    def _decoded(self, stripe: _StripeRead) -> Objects | None:
        """The objects once enough fragments are there and none of those used was damaged on its way here."""
        while stripe.gathering.is_ready:
            objects = stripe.gathering.decode(self._allocate)
            damaged = stripe.gathering.recheck() if any(isinstance(item, Miss) for item in objects.values()) else ()
            if not damaged:
                return objects
            stripe.reasons += damaged
            self._ask_more(stripe)
        return None

    def _ask_more(self, stripe: _StripeRead) -> None:
        """Ask what was left out: one for each erasure at once, everything when the stripe is slow."""
        if stripe.gathering.is_ready or not stripe.unasked:
            return
        is_slow = self._clock_us() - stripe.started_us >= self._config.slow_us
        held = sum(place is not None for place in stripe.record.locations)
        asked_well = len(stripe.pending) + stripe.gathering.count
        self._ask(stripe, held if is_slow else max(0, self._config.code.ask - asked_well))

    def _ask(self, stripe: _StripeRead, count: int) -> None:
        while count > 0 and stripe.unasked:
            index = stripe.unasked.pop(0)
            place = stripe.record.locations[index]
            assert place is not None, f"fragment {index} was never stored"
            if self._send(stripe, index, place):
                count -= 1

    def _send(self, stripe: _StripeRead, index: int, place: Location) -> bool:
        port = self._nodes.get(self._node_of.get(place.device, ""))
        if port is None:
            stripe.unreachable += 1
            stripe.reasons.append(f"fragment {index}: the node of {place.device} is not connected")
            return False
        future = port.read(place)
        stripe.pending[future] = index
        future.add_done_callback(stripe.arrived.put)
        return True


def _answers(arrived: SimpleQueue[Read], timeout_s: float) -> list[Read]:
    """What has been answered: at least one within the time, and all that there is by then."""
    done: list[Read] = []
    with suppress(Empty):
        done.append(arrived.get(timeout=timeout_s))
        while True:
            done.append(arrived.get_nowait())
    return done
