"""After a restart: read every fragment head, put stripes together again, and fill a new index with them.

What counts: k or more fragments that agree on stripe, generation, shape, lengths and objects. Of several generations
of one stripe the newest complete one counts. Everything else is garbage and is listed for deletion. Last use is not
kept on disk: a recovered grain has its full time to live from now, bounded by its age since it was first written,
so nothing that was readable before is evicted first for want of a recent hit.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Erased, Location, StripeRecord
from shoal.kvstore.core.stripe import Checksums, Head, read_head
from shoal.kvstore.io.record import stored_bytes
from shoal.kvstore.ports import ScanPort, failure_of


@dataclass(frozen=True, slots=True)
class Recovered:
    """Stripes that can be decoded, fragments that can go, fragments whose heads this version does not know (they are
    left alone), and devices that could not be scanned.
    """

    stripes: tuple[StripeRecord, ...]
    garbage: tuple[Location, ...]
    unknown: tuple[Location, ...]
    unreadable: tuple[str, ...]


def scan_nodes(
    nodes: Mapping[str, ScanPort], config: StoreConfig, sums: Checksums, now_us: int, timeout_us: int
) -> Recovered:
    """Scan all devices in parallel for at most `timeout_us`; a device that does not answer counts as lost for now.

    Fragments younger than twice `write_timeout_us` are never garbage: their stripe may be being written.
    If any device was unreadable, garbage is not reported: what looks incomplete may be whole when it is back.
    """
    asked = {device.name: nodes[device.node].scan(device.name) for device in config.devices if device.node in nodes}
    wait(asked.values(), timeout=timeout_us / 1e6)
    found: list[tuple[Location, bytes]] = []
    unreadable = [f"{device.name}: its node is not connected" for device in config.devices if device.name not in asked]
    for name, future in asked.items():
        failure = failure_of(future) if future.done() else "no answer in time"
        if failure is None:
            found += future.result().value
        else:
            unreadable.append(f"{name}: {failure}")
    whole = assemble(found, sums, now_us - 2 * config.write_timeout_us)
    return Recovered(whole.stripes, () if unreadable else whole.garbage, whole.unknown, tuple(unreadable))


def assemble(found: Iterable[tuple[Location, bytes]], sums: Checksums, settled_us: int) -> Recovered:
    """Group fragments into stripes, oldest first so that predecessors come first, and sort out the rest.

    Only fragments created before `settled_us` can be garbage.
    """
    groups: dict[bytes, dict[tuple[object, ...], list[tuple[Head, Location]]]] = {}
    garbage: list[tuple[Head, Location]] = []
    unknown: list[Location] = []
    for location, raw in found:
        head = read_head(raw, sums)
        if isinstance(head, Erased):
            unknown.append(location)
            continue
        shape = (head.generation, head.data, head.parity, head.code, head.data_bytes, head.shard_bytes, head.table)
        groups.setdefault(head.stripe_id, {}).setdefault(shape, []).append((head, location))
    stripes = []
    for shapes in groups.values():
        best: StripeRecord | None = None
        for members in sorted(shapes.values(), key=lambda group: -group[0][0].generation):
            places, surplus = _places(members)
            complete = best is None and sum(place is not None for place in places) >= members[0][0].data
            if complete:
                best = _record(members[0][0], places)
                garbage += surplus
            else:
                garbage += members
        if best is not None:
            stripes.append(best)
    stripes.sort(key=lambda record: (record.created_us, record.stripe_id))
    settled = tuple(location for head, location in garbage if head.created_us < settled_us)
    return Recovered(tuple(stripes), settled, tuple(unknown), ())


def _places(
    members: Sequence[tuple[Head, Location]],
) -> tuple[tuple[Location | None, ...], list[tuple[Head, Location]]]:
    """One location for each fragment index, no device twice; and the duplicates."""
    first = members[0][0]
    places: list[Location | None] = [None] * (first.data + first.parity)
    surplus = []
    for head, location in members:
        if places[head.index] is None:
            places[head.index] = location
        else:
            surplus.append((head, location))
    return tuple(places), surplus


def _record(head: Head, places: tuple[Location | None, ...]) -> StripeRecord:
    size = sum(stored_bytes(place.length) for place in places if place is not None)
    return StripeRecord(
        head.stripe_id,
        head.generation,
        head.data,
        head.parity,
        head.data_bytes,
        size,
        head.created_us,
        places,
        head.table,
    )
