"""Stripes to devices: weighted by nothing but a hash, spread over nodes, with a check that explains itself.

Rendezvous hashing with our own byte layout and version: every stripe ranks all devices by a keyed hash of (stripe,
device). Two stripes that share one device share the others only by chance, so the rebuild of a lost device is read
from, and written to, all others alike; adding or losing a device moves only the stripes that it wins or held.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shoal.kvstore.errors import PlacementError

PLACEMENT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A device that can hold a fragment, and the node that would take it down."""

    device: str
    node: str


@dataclass(frozen=True, slots=True)
class Placement:
    """`devices[i]` holds fragment i; None where no device was left. `version` names the function that chose."""

    version: int
    devices: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a placement keeps the rules, what one lost node costs, and every rule in a sentence."""

    is_valid: bool
    fragments_per_node_max: int
    survives_node_loss: bool
    reasons: tuple[str, ...]


def place(stripe_id: bytes, slots: Sequence[Slot], width: int, fragments_min: int) -> Placement:
    """Up to `width` distinct devices for one stripe, nodes filled evenly, best hash first.

    Fewer than `width` devices leave the last fragments unplaced; fewer than `fragments_min` raise PlacementError.
    """
    if len(slots) < fragments_min:
        raise PlacementError(
            f"stripe needs {fragments_min} devices that take writes, {len(slots)} are left; free or replace devices"
        )
    ranked: dict[str, list[tuple[bytes, str]]] = {}
    for slot in slots:
        ranked.setdefault(slot.node, []).append((_score(stripe_id, slot.device), slot.device))
    turns: list[tuple[int, bytes, str]] = []
    for scored in ranked.values():
        turns += [(turn, score, name) for turn, (score, name) in enumerate(sorted(scored))]
    # Turn 0 of every node comes before turn 1 of any: nodes differ by at most one fragment while devices last.
    chosen = [name for _, _, name in sorted(turns)[:width]]
    return Placement(PLACEMENT_VERSION, (*chosen, *[None] * (width - len(chosen))))


def check(placement: Placement, slots: Sequence[Slot], parity: int) -> Check:
    """Judge a placement against the topology: known devices, no device twice, cost of losing a node."""
    nodes = {slot.device: slot.node for slot in slots}
    used = [device for device in placement.devices if device is not None]
    unknown = sorted(device for device in used if device not in nodes)
    twice = sorted(device for device, count in Counter(used).items() if count > 1)
    by_node = Counter(nodes[device] for device in used if device in nodes)
    most = max(by_node.values(), default=0)
    unplaced = len(placement.devices) - len(used)
    survives = most + unplaced <= parity
    reasons = (
        f"placement function {placement.version}, this library has {PLACEMENT_VERSION}",
        f"unknown devices: {unknown}" if unknown else "every device is in the topology",
        f"devices that hold two fragments: {twice}" if twice else "no device holds two fragments",
        f"{unplaced} fragments unplaced, so {max(0, parity - unplaced)} further losses are survived",
        f"a lost node costs up to {most} fragments of {len(used)}: " + ("survived" if survives else "NOT survived"),
    )
    return Check(not unknown and not twice, most, survives, reasons)


def _score(stripe_id: bytes, device: str) -> bytes:
    tag = b"shoal placement %d" % PLACEMENT_VERSION
    return blake2b(tag + len(stripe_id).to_bytes(4, "little") + stripe_id + device.encode(), digest_size=16).digest()
