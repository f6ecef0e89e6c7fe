"""Give back the space of what the index has let go: expire, delete the fragments, confirm. Call it periodically."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Location
from shoal.kvstore.ports import NodePort, Reply, failure_of
from shoal.kvstore.service import IndexService


@dataclass(frozen=True, slots=True)
class Swept:
    """One round: grains past their time, stripes deleted, and why others stay listed for the next round."""

    grains_expired: int
    stripes_deleted: int
    reasons: tuple[str, ...]


def sweep(index: IndexService, nodes: Mapping[str, NodePort], config: StoreConfig, stripes_max: int = 256) -> Swept:
    """One bounded round: at most `stripes_max` stripes and `write_timeout_us` of waiting.

    A stripe is confirmed when every reachable node has deleted its fragments; one on a node that is not connected
    is confirmed too, and its leftovers there are dropped when that node's devices are scanned again.
    """
    expired = index.expire()
    records = index.freed(stripes_max)
    places = [(record, place) for record in records for place in record.locations if place is not None]
    failures = delete_fragments([place for _, place in places], nodes, config)
    kept = {(record.stripe_id, record.generation) for record, place in places if _node(config, place) in failures}
    names = [(record.stripe_id, record.generation) for record in records]
    deleted = index.confirm_deleted([name for name in names if name not in kept])
    return Swept(expired, deleted, tuple(f"{node}: {why}" for node, why in sorted(failures.items())))


def delete_fragments(places: Sequence[Location], nodes: Mapping[str, NodePort], config: StoreConfig) -> dict[str, str]:
    """Delete fragments, one call a node, all in parallel; node -> reason for every call that failed."""
    by_node: dict[str, list[Location]] = {}
    for place in places:
        by_node.setdefault(_node(config, place), []).append(place)
    calls: dict[str, Future[Reply[int]]] = {
        node: nodes[node].delete(tuple(held)) for node, held in by_node.items() if node in nodes
    }
    wait(calls.values(), timeout=config.write_timeout_us / 1e6)
    answers = {node: failure_of(call) if call.done() else "no answer in time" for node, call in calls.items()}
    return {node: why for node, why in answers.items() if why is not None}


def _node(config: StoreConfig, place: Location) -> str:
    return next((device.node for device in config.devices if device.name == place.device), "")
