"""A storage node: some devices behind plain calls with picklable values, to be wrapped by an actor or a pool."""

from collections.abc import Mapping

from shoal.kvstore.config import StoreConfig
from shoal.kvstore.core.records import Erased, Location, Refused
from shoal.kvstore.io.buffers import BufferPool
from shoal.kvstore.io.device import DirectoryDevice
from shoal.kvstore.ports import Device, DeviceUsage, Reply


class StoreNode:
    """Routes calls to devices by name; every reply carries the node's boot id. As thread-safe as its devices."""

    def __init__(self, devices: Mapping[str, Device], boot_id: str) -> None:
        self._devices = dict(devices)
        self._boot_id = boot_id

    def append(self, device: str, head: bytes, payload: bytes | memoryview) -> Reply[Location | Refused]:
        """Write one fragment to a device; Refused when it is full, read-only, missing or not of this node."""
        found = self._devices.get(device)
        value = Refused(f"{device}: not a device of this node") if found is None else found.append(head, payload)
        return Reply(self._boot_id, value)

    def read(self, location: Location) -> Reply[bytes | Erased]:
        """Read one fragment; Erased when it is not there or does not verify."""
        reply = self.view(location)
        return Reply(reply.boot_id, bytes(reply.value) if isinstance(reply.value, memoryview) else reply.value)

    def view(self, location: Location) -> Reply[bytes | memoryview | Erased]:
        """The same without a copy, for callers in this process."""
        found = self._devices.get(location.device)
        value = Erased(f"{location.device}: not a device of this node") if found is None else found.read(location)
        return Reply(self._boot_id, value)

    def delete(self, locations: tuple[Location, ...]) -> Reply[int]:
        """Delete fragments; the number that were there."""
        held = [(self._devices.get(location.device), location) for location in locations]
        return Reply(self._boot_id, sum(device.delete(location) for device, location in held if device is not None))

    def scan(self, device: str) -> Reply[tuple[tuple[Location, bytes], ...]]:
        """(location, head) of every whole fragment on one device; nothing for a device of another node."""
        found = self._devices.get(device)
        return Reply(self._boot_id, () if found is None else tuple(found.scan()))

    def usage(self) -> Reply[tuple[DeviceUsage, ...]]:
        """State of every device, by name."""
        return Reply(self._boot_id, tuple(device.usage for _, device in sorted(self._devices.items())))


def open_node(config: StoreConfig, node: str, boot_id: str) -> StoreNode:
    """The node named `node` of a configuration, its directories opened."""
    buffers = BufferPool(config.idle_bytes_max)
    mine = [device for device in config.devices if device.node == node]
    devices = {
        device.name: DirectoryDevice(device, config.segment_bytes, config.fsync, allocate=buffers.take)
        for device in mine
    }
    return StoreNode(devices, boot_id)
