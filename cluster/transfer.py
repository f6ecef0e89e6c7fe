"""The transfer port: one-sided writes into memory a peer registered, notifications after the data, ends as values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from shoal.cluster.core.handoff import Kind, KindSum
from shoal.cluster.core.transfer_plan import Pieces, Spans

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pending:
    """Posted and not ended: it may still land, also after a deadline of the waiter."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte has landed and the notification, if any, is on its way behind them."""


@dataclass(frozen=True, slots=True)
class NotPosted:
    """Refused before anything was sent: unknown peer, range outside a registration, closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Posted and failed because the peer is gone or was removed; some bytes may have landed."""

    reason: str


WriteState = Pending | Done | NotPosted | Lost


@dataclass(frozen=True, slots=True)
class Notification:
    """Bytes a peer sent with (and after) a write."""

    peer: str
    message: bytes


class WriteHandle(Protocol):
    """One write on its way."""

    def state(self) -> WriteState:
        """The state now, without waiting."""
        ...

    def wait(self, timeout_s: float) -> WriteState:
        """The state at its end or after `timeout_s`, whichever is first; Pending then, and the write goes on."""
        ...


class Transfer(Protocol):
    """One agent: registers its buffers, writes into those of its peers. Every method may be called from any thread.

    A group's agent name holds its epoch (`Group.agent`), so a peer that came back is a new name. After `Lost` the
    peer stays lost until `remove_peer`. After `close` writes are NotPosted and `poll` is empty.
    """

    def register(self, name: str, buffer: Buffer) -> None:
        """Let peers write into `buffer` (uint8, contiguous; kept alive here); only before `metadata`."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`; freezes the set of buffers."""
        ...

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Know a peer; the same again changes nothing, other metadata under a known name raises ValueError."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer: its pending writes end as Lost. Unknown names change nothing."""
        ...

    def write(self, peer: str, pieces: Sequence[Pieces], notify: bytes | None) -> WriteHandle:
        """Post one write. The caller leaves the local bytes alone until the handle ends."""
        ...

    def poll(self) -> tuple[Notification, ...]:
        """Notifications that arrived since the last call, those of one peer in the order of its ended writes."""
        ...

    def close(self) -> None:
        """End everything pending as Lost and let go of all buffers; twice is once."""
        ...


def check_buffer(name: str, buffer: Buffer) -> None:
    """Raise ValueError unless `buffer` can be registered."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.size:
        raise ValueError(
            f"buffer '{name}': {buffer.dtype} of shape {buffer.shape} must be one contiguous, non-empty uint8 row; "
            "pass array.reshape(-1).view(numpy.uint8)"
        )


def range_fault(pieces: Pieces, local_bytes: Mapping[str, int], remote_bytes: Mapping[str, int]) -> str:
    """Why these pieces leave a registered buffer; empty if they do not. Both maps: buffer name to size."""
    spans = pieces.spans
    if spans.ndim != 2 or spans.shape[1] != 3 or spans.dtype != np.int64:
        return f"spans must be int64 [pieces, 3], not {spans.dtype} {spans.shape}"
    for side, column, buffer, sizes in (
        ("local", 0, pieces.local, local_bytes),
        ("remote", 1, pieces.remote, remote_bytes),
    ):
        size = sizes.get(buffer)
        if size is None:
            return f"{side} buffer '{buffer}' is not registered; registered: {sorted(sizes)}"
        # start > size - bytes, not start + bytes > size: the sum of two hostile int64 may wrap.
        if len(spans) and (
            (spans[:, 2] <= 0).any() or (spans[:, column] < 0).any() or (spans[:, column] > size - spans[:, 2]).any()
        ):
            return f"a piece leaves {side} buffer '{buffer}' of {size} bytes"
    return ""


class KindDigest:
    """Running checksum (XXH3, 64 bits) of one kind: the source feeds chunk by chunk, the target all at once."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._hash = xxhash.xxh3_64()
        self._byte_count = 0

    def update(self, buffer: Buffer, spans: Spans) -> None:
        """Feed the ranges int64 [ranges, 2] = (offset, bytes) of `buffer`, in order."""
        for offset, length in spans.tolist():
            self._hash.update(buffer[offset : offset + length].data)
            self._byte_count += length

    def value(self) -> KindSum:
        """Bytes and checksum so far."""
        return KindSum(self._kind, self._byte_count, self._hash.intdigest())


def kind_sums(parts: Iterable[tuple[Kind, Buffer, Spans]]) -> tuple[KindSum, ...]:
    """The checksum of each kind, fed in the order given; a kind may come in several parts."""
    digests: dict[Kind, KindDigest] = {}
    for kind, buffer, spans in parts:
        digests.setdefault(kind, KindDigest(kind)).update(buffer, spans)
    return tuple(d.value() for d in digests.values())
