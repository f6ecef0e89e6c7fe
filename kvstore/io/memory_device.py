"""A device in memory with the same contract as a directory, and switches for the faults a disk can have."""

from collections.abc import Iterator
from threading import Lock

from shoal.kvstore.config import DeviceConfig
from shoal.kvstore.core.records import Erased, Location, Refused
from shoal.kvstore.io.checksums import crc32c
from shoal.kvstore.io.record import HEADER_BYTES, Record, check_fragment, pack_header, read_header, stored_bytes
from shoal.kvstore.ports import DeviceUsage


class MemoryDevice:
    """Records in a dictionary, one segment. Set `state` to "read-only" or "missing" to inject that fault."""

    def __init__(self, config: DeviceConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._records: dict[int, bytearray] = {}
        self._next = 0
        self._stored_bytes = 0
        self.state = "ok"

    @property
    def usage(self) -> DeviceUsage:
        """Bytes, cap and state now."""
        config = self._config
        return DeviceUsage(config.name, self.state, self._stored_bytes, config.capacity_bytes, len(self._records))

    def append(self, head: bytes, payload: bytes | memoryview) -> Location | Refused:
        """Keep a copy of one fragment."""
        size = stored_bytes(len(head) + len(payload))
        with self._lock:
            if self.state != "ok":
                return Refused(f"{self._config.name}: {self.state}")
            if self._stored_bytes + size > self._config.capacity_bytes:
                return Refused(
                    f"{self._config.name}: full, {self._stored_bytes} of {self._config.capacity_bytes} bytes"
                )
            offset, self._next = self._next, self._next + size
            self._records[offset] = bytearray(b"".join((pack_header(1, offset, head, payload, crc32c), head, payload)))
            self._stored_bytes += size
        return Location(self._config.name, 1, offset, len(head) + len(payload))

    def read(self, location: Location) -> memoryview | Erased:
        """Head and payload, verified as a directory verifies them."""
        raw = self._records.get(location.offset) if location.segment == 1 else None
        if raw is None or self.state == "missing":
            return Erased(f"{self._config.name}: nothing at {location.segment}:{location.offset}")
        record = read_header(bytes(raw[:HEADER_BYTES]), 1, location.offset, crc32c)
        if isinstance(record, Erased):
            return record
        fragment = memoryview(bytes(raw[HEADER_BYTES : HEADER_BYTES + location.length]))
        return check_fragment(fragment, record, crc32c) or fragment

    def delete(self, location: Location) -> bool:
        """Forget one fragment."""
        with self._lock:
            raw = self._records.pop(location.offset, None) if location.segment == 1 else None
            if raw is None:
                return False
            self._stored_bytes -= stored_bytes(len(raw) - HEADER_BYTES)
            return True

    def scan(self) -> Iterator[tuple[Location, bytes]]:
        """(location, head) of every fragment."""
        with self._lock:
            held = [] if self.state == "missing" else sorted(self._records.items())
        for offset, raw in held:
            record = read_header(bytes(raw[:HEADER_BYTES]), 1, offset, crc32c)
            if isinstance(record, Record):
                head = bytes(raw[HEADER_BYTES : HEADER_BYTES + record.head_bytes])
                if crc32c(head) == record.head_crc:
                    yield record.location(self._config.name), head

    def flip(self, location: Location, byte: int) -> None:
        """Fault: invert one byte of a record (header, head and payload counted together)."""
        self._records[location.offset][byte] ^= 0xFF
