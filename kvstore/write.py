"""One stripe to its devices: all fragments in parallel, acknowledged when enough are durable, cleaned up if not."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.placement import place
from shoal.kvstore.core.records import Location, Refused, StripeRecord
from shoal.kvstore.core.stripe import Stripe
from shoal.kvstore.errors import PlacementError
from shoal.kvstore.io.record import stored_bytes
from shoal.kvstore.ports import NodePort, Reply, failure_of

Append = Future[Reply[Location | Refused]]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A stripe that did not become durable; its objects were dropped (a cache may lose, and it says so)."""

    objects: int
    reasons: tuple[str, ...]


class StripeWriter:
    """Places and appends stripes. Remembers which devices refused, so that later stripes avoid them for a while."""

    def __init__(self, nodes: Mapping[str, NodePort], config: StoreConfig, clock_us: Callable[[], int]) -> None:
        self._nodes = nodes
        self._config = config
        self._clock_us = clock_us
        self._node_of = {device.name: device.node for device in config.devices}
        self._avoid_until_us: dict[str, int] = {}

    def write(self, stripe: Stripe) -> StripeRecord | WriteFailed:
        """Append every fragment; the record of what is durable, or the reasons why too little is.

        Waits at most `write_timeout_us`, and at most `straggler_us` once enough are durable. Fragments of a failed
        stripe are deleted, also those whose answer comes late; a crash in between leaves fragments that recovery
        either puts together into a stripe or drops.
        """
        config = self._config
        slots = [device.slot for device in config.devices if self._takes_writes(device.name)]
        try:
            chosen = place(stripe.stripe_id, slots, config.code.width, config.code.durable_min).devices
        except PlacementError as error:
            return WriteFailed(len(stripe.table), (str(error),))
        pending: dict[int, Append] = {}
        reasons = []
        for index, device in enumerate(chosen):
            if device is None:
                reasons.append(f"fragment {index}: no device left")
                continue
            port = self._nodes.get(self._node_of[device])
            if port is None:
                self._refused(index, device, "its node is not connected", reasons)
                continue
            pending[index] = port.append(device, stripe.heads[index], stripe.payloads[index])
        self._wait(pending)
        places: list[Location | None] = [None] * config.code.width
        for index, future in pending.items():
            answer = _answer(future)
            if isinstance(answer, Location):
                places[index] = answer
            else:
                self._refused(index, str(chosen[index]), answer, reasons)
        durable = sum(place is not None for place in places)
        if durable < config.code.durable_min:
            self._clean_up(pending.values())
            return WriteFailed(len(stripe.table), (f"{durable} fragments durable of {len(places)}", *reasons))
        self._clean_up(future for future in pending.values() if not future.done())
        return _record(stripe, tuple(places))

    def _wait(self, pending: Mapping[int, Append]) -> None:
        """Until all have answered, the time is up, or enough are durable and the rest had `straggler_us` more."""
        deadline_us = self._clock_us() + self._config.write_timeout_us
        rest = set(pending.values())
        is_enough = False
        while rest and self._clock_us() < deadline_us:
            _, rest = wait(rest, (deadline_us - self._clock_us()) / 1e6, return_when=FIRST_COMPLETED)
            durable = sum(isinstance(_answer(future), Location) for future in pending.values())
            if durable >= self._config.code.durable_min and not is_enough:
                is_enough = True
                deadline_us = min(deadline_us, self._clock_us() + self._config.straggler_us)

    def _takes_writes(self, device: str) -> bool:
        return self._avoid_until_us.get(device, 0) <= self._clock_us()

    def _refused(self, index: int, device: str, reason: str, reasons: list[str]) -> None:
        reasons.append(f"fragment {index} on {device}: {reason}")
        self._avoid_until_us[device] = self._clock_us() + self._config.write_timeout_us

    def _clean_up(self, futures: Iterable[Append]) -> None:
        for future in futures:
            future.add_done_callback(self._delete)

    def _delete(self, future: Append) -> None:
        if failure_of(future) is None:
            place = future.result().value
            port = self._nodes.get(self._node_of[place.device]) if isinstance(place, Location) else None
            if port is not None and isinstance(place, Location):
                port.delete((place,))


def _answer(future: Append) -> Location | str:
    """The location, or why there is none."""
    if not future.done():
        return "no answer in time"
    failure = failure_of(future)
    if failure is not None:
        return failure
    value = future.result().value
    return value if isinstance(value, Location) else value.reason


def _record(stripe: Stripe, places: tuple[Location | None, ...]) -> StripeRecord:
    size = sum(stored_bytes(place.length) for place in places if place is not None)
    return StripeRecord(
        stripe.stripe_id, stripe.generation, stripe.data, stripe.parity, stripe.data_bytes, size, stripe.created_us,
        places, stripe.table,
    )  # fmt: skip
