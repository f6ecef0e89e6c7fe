"""The record a device wraps around each fragment: it names its own segment and offset, so nothing else passes for it.

Record = header, head, payload, zero padding to RECORD_ALIGN. The header's CRC32C covers where the record is and
how long its parts are; another CRC32C covers the fragment's head, a third its payload.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from shoal.kvstore.core.records import Erased, Location
from shoal.kvstore.core.stripe import Buffer

RECORD_MAGIC = b"SHOALREC"
RECORD_VERSION = 1
# A page: records start where the file system can free the space of the one before.
RECORD_ALIGN = 4096
_HEADER = struct.Struct("<8sHHIQIIIII")  # magic, version, 0, segment, offset, head, payload, 2 x crc, own crc
HEADER_BYTES = _HEADER.size
_COVERED = _HEADER.size - 4


@dataclass(frozen=True, slots=True)
class Record:
    """A verified record header; lengths in bytes."""

    segment: int
    offset: int
    head_bytes: int
    payload_bytes: int
    head_crc: int
    payload_crc: int

    @property
    def stored_bytes(self) -> int:
        """Bytes the record takes in its segment, padding included."""
        return stored_bytes(self.head_bytes + self.payload_bytes)

    def location(self, device: str) -> Location:
        """Where the fragment is, as the rest of the store names it."""
        return Location(device, self.segment, self.offset, self.head_bytes + self.payload_bytes)


def stored_bytes(fragment_bytes: int) -> int:
    """Bytes that a fragment of this length takes on a device."""
    return -(-(HEADER_BYTES + fragment_bytes) // RECORD_ALIGN) * RECORD_ALIGN


def pack_header(
    segment: int, offset: int, head: bytes, payload: bytes | memoryview, crc32c: Callable[[Buffer], int]
) -> bytes:
    """Header of the record that will stand at `offset` of `segment`."""
    lengths = (len(head), len(payload), crc32c(head), crc32c(payload))
    covered = _HEADER.pack(RECORD_MAGIC, RECORD_VERSION, 0, segment, offset, *lengths, 0)[:_COVERED]
    return covered + struct.pack("<I", crc32c(covered))


def read_header(raw: bytes | memoryview, segment: int, offset: int, crc32c: Callable[[Buffer], int]) -> Record | Erased:
    """Parse a header that should stand at `offset` of `segment`."""
    if len(raw) < HEADER_BYTES:
        return Erased(f"record at {segment}:{offset}: {len(raw)} bytes are too few")
    magic, version, _, own_segment, own_offset, *lengths, own_crc = _HEADER.unpack_from(raw)
    if magic != RECORD_MAGIC or version != RECORD_VERSION or crc32c(raw[:_COVERED]) != own_crc:
        return Erased(f"record at {segment}:{offset}: header is not one")
    if (own_segment, own_offset) != (segment, offset):
        return Erased(f"record at {segment}:{offset}: header belongs to {own_segment}:{own_offset}")
    return Record(segment, offset, *lengths)


def check_fragment(fragment: bytes | memoryview, record: Record, crc32c: Callable[[Buffer], int]) -> Erased | None:
    """Verify head ‖ payload against the record's checksums."""
    at = f"record at {record.segment}:{record.offset}"
    view = memoryview(fragment)
    if len(view) != record.head_bytes + record.payload_bytes:
        return Erased(f"{at}: {len(view)} bytes read of {record.head_bytes} + {record.payload_bytes}")
    if crc32c(view[: record.head_bytes]) != record.head_crc:
        return Erased(f"{at}: head CRC32C differs")
    if crc32c(view[record.head_bytes :]) != record.payload_crc:
        return Erased(f"{at}: payload CRC32C differs")
    return None
