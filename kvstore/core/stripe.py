"""Stripes: objects gathered into data bytes, cut into shards, framed as self-describing fragments, and back.

A fragment is a head and a payload. The head carries magic, version, stripe id, generation, index, shape, lengths,
code name, the object table and CRC32C of payload and head, so the index can be rebuilt from heads alone and a
decode can refuse every fragment that is not exactly of this stripe and generation.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
from shoal.kvstore.core.chain import KEY_BYTES
from shoal.kvstore.core.records import Erased, Kind, Miss, StoredObject, TableEntry, TrafficClass
from shoal.kvstore.errors import ObjectError

FRAGMENT_MAGIC = b"SHOALFRG"
FRAGMENT_VERSION = 1
SHARD_ALIGN = 64
CODE_NAME_BYTES = 16
# magic, version, head bytes, stripe id, generation, index, k, m, code, data bytes, shard bytes, created us, objects,
# payload CRC32C
_HEAD = struct.Struct("<8sHI16sQHHH16sQQQII")
# kind, class, key, parent, grain index, offset, length, checksum
_ENTRY = struct.Struct("<BB16s16sIQQ16s")
_CRC = struct.Struct("<I")
_CLASSES = (TrafficClass.DEFAULT, TrafficClass.AGENT, TrafficClass.CHAT)  # position = byte on disk; append only
Bytes = npt.NDArray[np.uint8]
Buffer = bytes | memoryview | Bytes
Known = tuple[bytes, tuple[TableEntry, ...]]  # a table as it is written, and what it says
Allocate = Callable[[int], Bytes]  # writable uint8 [size] of any content


class Code(Protocol):
    """A systematic erasure code over GF(2^8): `data` shards kept as they are, `parity` shards computed."""

    @property
    def name(self) -> str:
        """Code and matrix, at most 16 ASCII bytes: parity of another name is not interchangeable."""

    def encode(self, data: Bytes, parity: Bytes) -> None:
        """Fill parity uint8 [m, shard bytes] from data uint8 [k, shard bytes]."""

    def rebuild(self, shards: Mapping[int, Bytes], lost: Mapping[int, Bytes], parity: int) -> None:
        """Fill the rows of the lost data shards from exactly k shards, both by index; rows are contiguous."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """CRC32C of one buffer (Castagnoli, 32 bits) and a 128-bit digest of a prefix and a buffer."""

    crc32c: Callable[[Buffer], int]
    digest128: Callable[[bytes, Buffer], bytes]

    def bind(self, kind: Kind, key: bytes, payload: Buffer) -> bytes:
        """16 bytes that tie a payload to its key and kind: another key's payload never passes for this one's."""
        return self.digest128(bytes((kind,)) + key, payload)


@dataclass(frozen=True, slots=True)
class Head:
    """A verified fragment head."""

    stripe_id: bytes
    generation: int
    index: int
    data: int
    parity: int
    code: str
    data_bytes: int
    shard_bytes: int
    created_us: int
    payload_crc: int
    head_bytes: int
    table: tuple[TableEntry, ...]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A verified fragment; `payload` is uint8 [shard bytes], a view of what was read."""

    head: Head
    payload: Bytes


@dataclass(frozen=True, slots=True)
class Stripe:
    """An encoded stripe: `heads[i]` and `payloads[i]` make fragment i; `content` is all objects' bytes, in order.

    Payloads and content are read-only views of one buffer.
    """

    stripe_id: bytes
    generation: int
    data: int
    parity: int
    data_bytes: int
    created_us: int
    heads: tuple[bytes, ...]
    payloads: tuple[memoryview, ...]
    content: memoryview
    table: tuple[TableEntry, ...]

    def payload_of(self, entry: TableEntry) -> memoryview:
        """One object's bytes."""
        return self.content[entry.offset : entry.offset + entry.length]


@dataclass(frozen=True, slots=True)
class StripeShape:
    """Identity and shape that every fragment of one stripe repeats."""

    stripe_id: bytes
    generation: int
    data: int
    parity: int
    created_us: int


def fresh(size: int) -> Bytes:
    """Memory of any content, uint8 [size]."""
    return np.empty(size, dtype=np.uint8)


def encode_stripe(
    shape: StripeShape, objects: Sequence[StoredObject], code: Code, sums: Checksums, allocate: Allocate = fresh
) -> Stripe:
    """Gather objects in order, compute parity and frame all k+m fragments. O(bytes); at least one object."""
    assert objects, "a stripe holds at least one object"
    sizes = [_check(item) for item in objects]
    offsets = list(accumulate(sizes, initial=0))
    data_bytes = offsets[-1]
    shard_bytes = max(1, -(-data_bytes // (shape.data * SHARD_ALIGN))) * SHARD_ALIGN
    width = shape.data + shape.parity
    rows = allocate(width * shard_bytes).reshape(width, shard_bytes)
    data = rows[: shape.data].reshape(-1)
    data[data_bytes:] = 0
    table = []
    for item, offset, size in zip(objects, offsets, sizes, strict=False):
        payload = data[offset : offset + size]
        payload[:] = np.frombuffer(item.payload, dtype=np.uint8)
        # Of the copy, while it is in the processor's cache: what is written is what was summed.
        bound = sums.bind(item.kind, item.key, payload)
        table.append(TableEntry(item.kind, item.key, item.parent, item.grain_index, item.traffic, offset, size, bound))
    code.encode(rows[: shape.data], rows[shape.data :])
    rows.flags.writeable = False
    rest = (code.name, data_bytes, shard_bytes)
    body = b"".join(_entry(entry) for entry in table)
    heads = tuple(
        _head(shape, index, rest, (len(table), sums.crc32c(row)), body, sums) for index, row in enumerate(rows)
    )
    return Stripe(
        shape.stripe_id, shape.generation, shape.data, shape.parity, data_bytes, shape.created_us, heads,
        tuple(row.data for row in rows), rows.reshape(-1)[:data_bytes].data, tuple(table),
    )  # fmt: skip


def read_head(raw: bytes | memoryview, sums: Checksums, known: Known | None = None) -> Head | Erased:
    """Parse and verify the head at the start of `raw`; anything that is not exactly a head is Erased.

    `known` is the table of another fragment of the stripe, so that the same bytes need not be parsed again.
    """
    if len(raw) < _HEAD.size + _CRC.size:
        return Erased(f"head: {len(raw)} bytes are too few")
    fields = _HEAD.unpack_from(raw)
    magic, version, head_bytes, stripe_id, generation, index, data, parity = fields[:8]
    code, data_bytes, shard_bytes, created_us, count, payload_crc = fields[8:]
    if magic != FRAGMENT_MAGIC or version != FRAGMENT_VERSION:
        return Erased(f"head: magic {magic!r} version {version}, expected {FRAGMENT_MAGIC!r} {FRAGMENT_VERSION}")
    if head_bytes != _HEAD.size + count * _ENTRY.size + _CRC.size or head_bytes > len(raw):
        return Erased(f"head: {head_bytes} bytes stated for {count} objects, {len(raw)} read")
    if sums.crc32c(raw[: head_bytes - _CRC.size]) != _CRC.unpack_from(raw, head_bytes - _CRC.size)[0]:
        return Erased("head: CRC32C differs")
    if index >= data + parity or data_bytes > data * shard_bytes:
        return Erased(f"head: index {index} or {data_bytes} bytes outside {data}+{parity} shards of {shard_bytes}")
    body = raw[_HEAD.size : head_bytes - _CRC.size]
    table = known[1] if known and known[0] == body else _read_table(body, data_bytes)
    if isinstance(table, Erased):
        return table
    name = code.rstrip(b"\0").decode("ascii", errors="replace")
    return Head(
        stripe_id, generation, index, data, parity, name, data_bytes, shard_bytes, created_us, payload_crc, head_bytes,
        table,
    )  # fmt: skip


def open_fragment(raw: bytes | memoryview, sums: Checksums) -> Fragment | Erased:
    """Verify one fragment (head ‖ payload) as it came from a device."""
    fragment = _frame(raw, read_head(raw, sums))
    if isinstance(fragment, Erased):
        return fragment
    return _damage(fragment, sums) or fragment


def _frame(raw: bytes | memoryview, head: Head | Erased) -> Fragment | Erased:
    """Head and payload of one fragment, the payload's bytes not yet looked at."""
    if isinstance(head, Erased):
        return head
    payload = np.frombuffer(raw, dtype=np.uint8, offset=head.head_bytes)
    if len(payload) != head.shard_bytes:
        return Erased(f"payload: {len(payload)} bytes, head says {head.shard_bytes}")
    return Fragment(head, payload)


def _damage(fragment: Fragment, sums: Checksums) -> Erased | None:
    return None if sums.crc32c(fragment.payload) == fragment.head.payload_crc else Erased("payload: CRC32C differs")


class Gathering:
    """Fragments of ONE stripe and generation as they arrive, until any k allow the decode."""

    def __init__(self, stripe_id: bytes, generation: int, shape: tuple[int, int], code: Code, sums: Checksums) -> None:
        """`shape` is (data, parity); only fragments that agree with all of it are ever used."""
        self._identity = (stripe_id, generation, *shape, code.name)
        self._data, self._parity = shape
        self._code = code
        self._sums = sums
        self._fragments: dict[int, Fragment] = {}
        self._known: Known | None = None

    @property
    def is_ready(self) -> bool:
        """Whether k fragments have been accepted."""
        return len(self._fragments) >= self._data

    @property
    def count(self) -> int:
        """Fragments accepted so far."""
        return len(self._fragments)

    def offer(self, index: int, raw: bytes | memoryview, is_summed: bool = False) -> Erased | None:
        """Take the answer for fragment `index`; an Erased says why it does not count.

        `is_summed`: a device has just verified the payload's CRC32C. It is not computed again unless what is decoded
        turns out wrong; then `recheck` finds the fragments that were damaged on their way here.
        """
        fragment = _frame(raw, read_head(raw, self._sums, self._known))
        if isinstance(fragment, Erased):
            return fragment
        if not is_summed and (damage := _damage(fragment, self._sums)) is not None:
            return damage
        head = fragment.head
        found = (head.stripe_id, head.generation, head.data, head.parity, head.code)
        if found != self._identity or head.index != index:
            return Erased(f"fragment {head.index} of {found}, expected {index} of {self._identity}")
        first = next(iter(self._fragments.values()), fragment).head
        if (head.shard_bytes, head.data_bytes, head.table) != (first.shard_bytes, first.data_bytes, first.table):
            return Erased(f"fragment {index} disagrees with the others about lengths or objects")
        self._fragments[index] = fragment
        if self._known is None:
            self._known = bytes(raw[_HEAD.size : head.head_bytes - _CRC.size]), head.table
        return None

    def recheck(self) -> tuple[str, ...]:
        """Let go of every fragment whose payload's CRC32C differs; what was let go, () if all are whole."""
        checked = {index: _damage(fragment, self._sums) for index, fragment in self._fragments.items()}
        damaged = {index: damage for index, damage in checked.items() if damage is not None}
        for index in damaged:
            del self._fragments[index]
        return tuple(f"fragment {index}: {damage.reason}" for index, damage in damaged.items())

    def decode(self, allocate: Allocate = fresh) -> dict[tuple[Kind, bytes], memoryview | Miss]:
        """Objects by (kind, key): a read-only view of the data bytes, or a Miss where the bound checksum differs.

        Call once `is_ready`. An object that lies in one shard is a view of its fragment; others are put together, and
        only lost data shards are computed.
        """
        assert self.is_ready, f"{len(self._fragments)} fragments, {self._data} needed"
        chosen = dict(sorted(self._fragments.items())[: self._data])
        head = next(iter(chosen.values())).head
        rows = {index: fragment.payload for index, fragment in chosen.items()}
        lost = [index for index in range(self._data) if index not in chosen]
        if lost:
            rebuilt = allocate(len(lost) * head.shard_bytes).reshape(len(lost), head.shard_bytes)
            found = dict(zip(lost, rebuilt, strict=True))
            self._code.rebuild(rows, found, self._parity)
            rows |= found
        return self._cut(head, rows, allocate)

    def _cut(
        self, head: Head, rows: Mapping[int, Bytes], allocate: Allocate
    ) -> dict[tuple[Kind, bytes], memoryview | Miss]:
        size = head.shard_bytes
        spanning = [entry for entry in head.table if entry.offset // size != (entry.offset + entry.length - 1) // size]
        room = allocate(sum(entry.length for entry in spanning)) if spanning else fresh(0)
        found: dict[tuple[Kind, bytes], memoryview | Miss] = {}
        for entry in head.table:
            index, start = divmod(entry.offset, size)
            payload = rows[index][start : start + entry.length]
            if len(payload) < entry.length:
                payload, room = room[: entry.length], room[entry.length :]
                _join(rows, entry.offset, payload)
            payload.flags.writeable = False
            is_bound = self._sums.bind(entry.kind, entry.key, payload) == entry.checksum
            miss = Miss(f"{entry.kind.name} {entry.key.hex()}: payload does not belong to its key")
            found[entry.kind, entry.key] = payload.data if is_bound else miss
        return found


def _join(rows: Mapping[int, Bytes], offset: int, target: Bytes) -> None:
    """Fill `target` with data bytes from `offset` on, wherever shards begin and end."""
    at = 0
    while at < len(target):
        index, start = divmod(offset + at, len(rows[0]))
        piece = rows[index][start : start + len(target) - at]
        target[at : at + len(piece)] = piece
        at += len(piece)


def _check(item: StoredObject) -> int:
    """Bytes of a payload that can be stored."""
    if len(item.key) != KEY_BYTES or len(item.parent) != KEY_BYTES:
        raise ObjectError(f"object keys of {len(item.key)} and {len(item.parent)} bytes; both must be {KEY_BYTES}")
    if not 0 <= item.grain_index < 2**32:
        raise ObjectError(f"grain_index = {item.grain_index} must lie in 0 to 2^32 - 1")
    view = memoryview(item.payload)
    if view.nbytes == 0 or not view.c_contiguous:
        raise ObjectError(f"payload of {item.key.hex()}: {view.nbytes} bytes must be contiguous and not empty")
    return view.nbytes


def _head(
    shape: StripeShape, index: int, rest: tuple[str, int, int], tail: tuple[int, int], body: bytes, sums: Checksums
) -> bytes:
    code, data_bytes, shard_bytes = rest
    name = code.encode("ascii")
    assert len(name) <= CODE_NAME_BYTES, f"code name {code!r} is longer than {CODE_NAME_BYTES} bytes"
    head_bytes = _HEAD.size + len(body) + _CRC.size
    fixed = _HEAD.pack(
        FRAGMENT_MAGIC, FRAGMENT_VERSION, head_bytes, shape.stripe_id, shape.generation, index, shape.data,
        shape.parity, name, data_bytes, shard_bytes, shape.created_us, *tail,
    )  # fmt: skip
    return fixed + body + _CRC.pack(sums.crc32c(fixed + body))


def _entry(entry: TableEntry) -> bytes:
    fields = (entry.key, entry.parent, entry.grain_index, entry.offset, entry.length, entry.checksum)
    return _ENTRY.pack(entry.kind, _CLASSES.index(entry.traffic), *fields)


def _read_table(body: bytes | memoryview, data_bytes: int) -> tuple[TableEntry, ...] | Erased:
    table = []
    for at in range(0, len(body), _ENTRY.size):
        entry = _read_entry(body, at, data_bytes)
        if isinstance(entry, Erased):
            return entry
        table.append(entry)
    return tuple(table)


def _read_entry(raw: bytes | memoryview, at: int, data_bytes: int) -> TableEntry | Erased:
    kind, traffic, key, parent, grain_index, offset, length, checksum = _ENTRY.unpack_from(raw, at)
    if kind not in (Kind.GRAIN, Kind.ANCHOR) or traffic >= len(_CLASSES) or offset + length > data_bytes:
        return Erased(f"head: object entry kind {kind} class {traffic} bytes {offset}+{length} of {data_bytes}")
    return TableEntry(Kind(kind), key, parent, grain_index, _CLASSES[traffic], offset, length, checksum)
