"""A device as a directory: append-only segment files, verified reads, freed space given back to the file system.

Every start of a device begins a new segment; older ones are never appended to. Records that are not whole (a torn
tail, a flipped header) are skipped by `scan`, and a torn tail is cut off when the device opens. Deleting a record
punches a hole, so no compaction is needed; a segment whose records are all gone is removed.

fsync (`FsyncRule`): ALWAYS syncs data before an append is answered, SEGMENT when a segment closes, NEVER leaves it to
the kernel. Space of a deleted record is not reused before the hole is punched, so no rule lets old bytes reappear
under a new name: the record header names its place and the stripe head its stripe.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from shoal.kvstore.config import DeviceConfig, FsyncRule
from shoal.kvstore.core.records import Erased, Location, Refused
from shoal.kvstore.core.stripe import Allocate, fresh
from shoal.kvstore.io.checksums import crc32c
from shoal.kvstore.io.record import (
    HEADER_BYTES,
    RECORD_ALIGN,
    Record,
    check_fragment,
    pack_header,
    read_header,
    stored_bytes,
)
from shoal.kvstore.ports import DeviceUsage

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # linux/falloc.h
_FULL = (errno.ENOSPC, errno.EDQUOT)
FailPoint = Callable[[str], None]


class DirectoryDevice:
    """Fragments of one directory. Thread-safe: appends and deletes take turns, reads run freely beside them."""

    def __init__(
        self,
        config: DeviceConfig,
        segment_bytes: int,
        fsync: FsyncRule,
        fail_point: FailPoint = lambda name: None,
        allocate: Allocate = fresh,
    ) -> None:
        """Open or create the directory and learn what it holds. `fail_point` is called between steps (crash tests);
        fragments are read into memory from `allocate`.
        """
        self._allocate = allocate
        self._config = config
        self._root = Path(config.path)
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._fail_point = fail_point
        self._lock = Lock()
        self._state = "ok"
        self._live: dict[int, dict[int, Record]] = {}  # segment -> offset -> record
        self._stored_bytes = 0
        self._fragments = 0
        self._tail: tuple[int, int] | None = None  # open segment's descriptor and length
        self._open_directory()
        self._segment = max(self._segments(), default=0)

    @property
    def usage(self) -> DeviceUsage:
        """Bytes that live records take, the cap, and whether the device takes writes."""
        state = self._state if self._root.is_dir() else "missing"
        return DeviceUsage(self._config.name, state, self._stored_bytes, self._config.capacity_bytes, self._fragments)

    def append(self, head: bytes, payload: bytes | memoryview) -> Location | Refused:
        """Write one fragment at the tail. After a failure the segment is cut back and closed."""
        size = stored_bytes(len(head) + len(payload))
        with self._lock:
            if self.usage.state in ("missing", "read-only"):
                return Refused(f"{self._config.name}: {self.usage.state}")
            if self._stored_bytes + size > self._config.capacity_bytes:
                return Refused(
                    f"{self._config.name}: full, {self._stored_bytes} of {self._config.capacity_bytes} bytes"
                )
            try:
                return self._append(head, payload, size)
            except OSError as error:
                return self._failed(error)

    def read(self, location: Location) -> memoryview | Erased:
        """Head and payload, verified; a file of its own per read, so that deletes never pull one away."""
        raw = self._allocate(HEADER_BYTES + location.length).data
        try:
            fd = os.open(self._path(location.segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                raw = raw[: _fill(fd, raw, location.offset)].toreadonly()
            finally:
                os.close(fd)
        except OSError as error:
            return Erased(f"{self._config.name}: {error}")
        record = read_header(raw[:HEADER_BYTES], location.segment, location.offset, crc32c)
        if isinstance(record, Erased):
            return record
        fragment = raw[HEADER_BYTES:]
        return check_fragment(fragment, record, crc32c) or fragment

    def delete(self, location: Location) -> bool:
        """Free one record's space; its header becomes zeros, so a later scan does not find it."""
        with self._lock:
            record = self._live.get(location.segment, {}).get(location.offset)
            if record is None:
                return False
            self._fail_point("delete:before")
            self._forget(record)
            try:
                self._free(record)
            except OSError as error:
                self._failed(error)
            self._fail_point("delete:after")
            return True

    def scan(self) -> Iterator[tuple[Location, bytes]]:
        """(location, head) of every whole record on disk; payload bytes are not read."""
        for segment in self._segments():
            with self._lock:
                records = sorted(self._live.get(segment, {}).values(), key=lambda record: record.offset)
            for record in records:
                head = self._read_head(record)
                if head is not None:
                    yield record.location(self._config.name), head

    def close(self) -> None:
        """Sync and close the open segment; the next append starts another."""
        with self._lock:
            self._close_segment()

    def _open_directory(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for segment in self._segments():
                self._learn(segment)
        except OSError as error:
            self._failed(error)
            return
        if not os.access(self._root, os.W_OK):
            self._state = "read-only"

    def _learn(self, segment: int) -> None:
        """Register the whole records of a segment and cut a torn tail."""
        path = self._path(segment)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size, good = os.fstat(fd).st_size, 0
            for record in _records(fd, segment, size):
                self._remember(record)
                good = record.offset + record.stored_bytes
        finally:
            os.close(fd)
        if os.access(path, os.W_OK):
            if good == 0:
                path.unlink()
            elif good < size:
                os.truncate(path, good)

    def _append(self, head: bytes, payload: bytes | memoryview, size: int) -> Location:
        fd, offset = self._tail_for(size)
        header = pack_header(self._segment, offset, head, payload, crc32c)
        self._fail_point("append:before")
        _write(fd, header + head, offset)
        self._fail_point("append:torn")
        start = offset + HEADER_BYTES + len(head)
        _write(fd, payload, start)
        _write(fd, bytes(offset + size - start - len(payload)), start + len(payload))
        self._fail_point("append:unsynced")
        if self._fsync is FsyncRule.ALWAYS:
            os.fdatasync(fd)
        record = read_header(header, self._segment, offset, crc32c)
        assert isinstance(record, Record), f"a header just packed does not parse: {record}"
        self._remember(record)
        self._tail = (fd, offset + size)
        self._fail_point("append:done")
        return record.location(self._config.name)

    def _tail_for(self, size: int) -> tuple[int, int]:
        """Descriptor and offset for the next record; a new segment when the open one has no room."""
        if self._tail is not None and os.fstat(self._tail[0]).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the open segment was removed under the device")
        if self._tail is not None and self._tail[1] > 0 and self._tail[1] + size > self._segment_bytes:
            self._close_segment()
        if self._tail is None:
            self._segment += 1
            fd = os.open(self._path(self._segment), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._tail = (fd, 0)
            if self._fsync is FsyncRule.ALWAYS:
                self._sync_directory()
        return self._tail

    def _close_segment(self) -> None:
        if self._tail is None:
            return
        fd, length = self._tail
        self._tail = None
        try:
            if self._fsync is not FsyncRule.NEVER:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        if length == 0 or not self._live.get(self._segment):
            self._path(self._segment).unlink(missing_ok=True)
        elif self._fsync is not FsyncRule.NEVER:
            self._sync_directory()

    def _failed(self, error: OSError) -> Refused:
        """Give up the open segment after an error; a full or read-only device says so from now on."""
        if self._tail is not None:
            fd, length = self._tail
            self._tail = None
            os.close(fd)
            try:
                os.truncate(self._path(self._segment), length)
            except FileNotFoundError:
                return Refused(f"{self._config.name}: {error}")
            except OSError:
                self._state = "read-only"  # what was half written stays, as a record that is not whole
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            self._state = "read-only"
        elif error.errno in _FULL:
            self._state = "full"
        return Refused(f"{self._config.name}: {error}")

    def _remember(self, record: Record) -> None:
        self._live.setdefault(record.segment, {})[record.offset] = record
        self._stored_bytes += record.stored_bytes
        self._fragments += 1

    def _forget(self, record: Record) -> None:
        del self._live[record.segment][record.offset]
        self._stored_bytes -= record.stored_bytes
        self._fragments -= 1
        if self._state == "full":
            self._state = "ok"

    def _free(self, record: Record) -> None:
        """Remove the segment if this was its last record and it is closed; else punch the record out."""
        is_open = self._tail is not None and record.segment == self._segment
        if not self._live[record.segment] and not is_open:
            del self._live[record.segment]
            self._path(record.segment).unlink(missing_ok=True)
            return
        fd = os.open(self._path(record.segment), os.O_RDWR | os.O_CLOEXEC)
        try:
            if not punch_hole(fd, record.offset, record.stored_bytes):
                # This file system cannot punch: the header goes now, the space with the segment.
                _write(fd, bytes(HEADER_BYTES), record.offset)
        finally:
            os.close(fd)

    def _read_head(self, record: Record) -> bytes | None:
        try:
            fd = os.open(self._path(record.segment), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # deleted since it was listed
        try:
            raw = _read(fd, record.head_bytes, record.offset + HEADER_BYTES)
        finally:
            os.close(fd)
        return raw if len(raw) == record.head_bytes and crc32c(raw) == record.head_crc else None

    def _sync_directory(self) -> None:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self._root.glob("*.seg") if path.stem.isdigit())

    def _path(self, segment: int) -> Path:
        return self._root / f"{segment:010d}.seg"


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give a range of a file back to the file system, reading as zeros from now on; False if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


def _records(fd: int, segment: int, size: int) -> Iterator[Record]:
    """Whole records in file order; steps over holes and over anything that is not a record, page by page."""
    at = 0
    while at + HEADER_BYTES <= size:
        record = read_header(_read(fd, HEADER_BYTES, at), segment, at, crc32c)
        if isinstance(record, Record) and at + HEADER_BYTES + record.head_bytes + record.payload_bytes <= size:
            yield record
            at += record.stored_bytes
            continue
        at += RECORD_ALIGN
        try:
            at = max(at, os.lseek(fd, at, os.SEEK_DATA) // RECORD_ALIGN * RECORD_ALIGN)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nothing but a hole up to the end
                raise
            return


def _read(fd: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes; fewer only at the end of the file."""
    raw = bytearray(length)
    return bytes(raw[: _fill(fd, memoryview(raw), offset)])


def _fill(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` from the file; the number of bytes, fewer only at the end of the file."""
    at = 0
    while at < len(target):
        count = os.preadv(fd, [target[at:]], offset + at)
        if count == 0:
            break
        at += count
    return at


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
