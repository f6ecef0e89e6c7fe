"""The transfer port inside one process: peers share a hub, faults are injected there."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.cluster.core.transfer_plan import Pieces
from shoal.cluster.transfer import (
    Buffer,
    Done,
    Lost,
    Notification,
    NotPosted,
    Pending,
    WriteState,
    check_buffer,
    range_fault,
)


class Fault(StrEnum):
    """What the hub does with one write."""

    NONE = "none"
    DELAY = "delay"
    DROP = "drop"
    FAIL = "fail"


FaultHook = Callable[[str, str, bytes | None], Fault]
"""(writer, peer, notification) -> what happens: DELAY lands at `flush`, DROP never ends, FAIL ends as Lost."""


class InProcessHandle:
    """A write in the hub."""

    def __init__(self, state: WriteState) -> None:
        self._state = state
        self._ended = threading.Event()
        if not isinstance(state, Pending):
            self._ended.set()

    def state(self) -> WriteState:
        """The state now."""
        return self._state

    def wait(self, timeout_s: float) -> WriteState:
        """The state at its end or after `timeout_s`."""
        self._ended.wait(timeout_s)
        return self._state

    def end(self, state: WriteState) -> None:
        """For the hub: the write ended; the first end counts."""
        if isinstance(self._state, Pending):
            self._state = state
            self._ended.set()


@dataclass(slots=True)
class _Write:
    writer: str
    peer: str
    pieces: Sequence[Pieces]
    notify: bytes | None
    handle: InProcessHandle
    is_dropped: bool


@dataclass(slots=True)
class _Member:
    metadata: bytes
    buffers: Mapping[str, Buffer]
    arrived: list[Notification] = field(default_factory=list)
    is_frozen: bool = False


class InProcessHub:
    """Memory of all peers of one process, and the faults between them."""

    def __init__(self, fault: FaultHook | None = None) -> None:
        self._fault = fault
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}
        self._waiting: list[_Write] = []

    def freeze(self, name: str) -> None:
        """Stop a peer as SIGSTOP would: writes to it stay pending."""
        with self._lock:
            self._members[name].is_frozen = True

    def thaw(self, name: str) -> None:
        """Let a frozen peer go on; what waited for it lands."""
        with self._lock:
            self._members[name].is_frozen = False
            self.flush()

    def lose(self, name: str) -> None:
        """A peer dies: its memory is gone, writes to it end as Lost."""
        with self._lock:
            self._members.pop(name, None)
            self.flush()

    def flush(self) -> None:
        """Land every delayed write whose peer is not frozen, in the order posted."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for write in waiting:
                self._carry_out(write)

    def join(self, name: str, metadata: bytes, buffers: Mapping[str, Buffer]) -> None:
        """A peer's buffers become writable."""
        with self._lock:
            if name in self._members:
                raise ValueError(f"peer '{name}' is in the hub already: a new life of a group needs a new epoch")
            self._members[name] = _Member(metadata, dict(buffers))

    def post(self, writer: str, peer: str, pieces: Sequence[Pieces], notify: bytes | None) -> InProcessHandle:
        """Start a write of checked ranges."""
        fault = self._fault(writer, peer, notify) if self._fault else Fault.NONE
        handle = InProcessHandle(Pending())
        write = _Write(writer, peer, tuple(pieces), notify, handle, fault is Fault.DROP)
        with self._lock:
            if fault is Fault.FAIL:
                handle.end(Lost(f"peer '{peer}': injected failure"))
            elif fault is Fault.NONE:
                self._carry_out(write)
            else:
                self._waiting.append(write)
        return handle

    def forget(self, writer: str, peer: str) -> None:
        """Writes of `writer` to `peer` that have not landed never will."""
        with self._lock:
            for write in self._waiting:
                if (write.writer, write.peer) == (writer, peer):
                    write.handle.end(Lost(f"peer '{peer}' was removed"))
            self._waiting = [w for w in self._waiting if isinstance(w.handle.state(), Pending)]

    def take(self, name: str) -> tuple[Notification, ...]:
        """Notifications that arrived for a peer, once."""
        with self._lock:
            member = self._members.get(name)
            if member is None:
                return ()
            arrived, member.arrived = member.arrived, []
            return tuple(arrived)

    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of each buffer of a peer; empty if it is gone."""
        with self._lock:
            member = self._members.get(name)
            return {n: b.size for n, b in member.buffers.items()} if member else {}

    def _carry_out(self, write: _Write) -> None:
        target, source = self._members.get(write.peer), self._members.get(write.writer)
        if target is None or source is None:
            write.handle.end(Lost(f"peer '{write.peer}' is gone"))
        elif target.is_frozen or write.is_dropped:
            self._waiting.append(write)
        else:
            for pieces in write.pieces:
                _copy(source.buffers[pieces.local], target.buffers[pieces.remote], pieces)
            if write.notify is not None:
                target.arrived.append(Notification(write.writer, write.notify))
            write.handle.end(Done())


class InProcessTransfer:
    """One peer of the hub."""

    def __init__(self, name: str, hub: InProcessHub) -> None:
        self._name = name
        self._hub = hub
        self._buffers: dict[str, Buffer] = {}
        self._metadata: bytes | None = None
        self._peers: dict[str, tuple[bytes, dict[str, int]]] = {}
        self._is_closed = False

    def register(self, name: str, buffer: Buffer) -> None:
        """Let peers write into `buffer`."""
        check_buffer(name, buffer)
        if self._is_closed or self._metadata is not None or name in self._buffers:
            raise ValueError(f"buffer '{name}' must be registered once and before metadata() is taken")
        self._buffers[name] = buffer

    def metadata(self) -> bytes:
        """Join the hub; peers hold this value as proof that they know this life."""
        if self._metadata is None:
            if self._is_closed:
                raise ValueError(f"transfer '{self._name}' is closed")
            self._metadata = f"{self._name} {time.monotonic_ns()}".encode()
            self._hub.join(self._name, self._metadata, self._buffers)
        return self._metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Know a peer of the hub."""
        if metadata.partition(b" ")[0] != name.encode():
            raise ValueError(f"metadata is not of peer '{name}' but of {metadata.partition(b' ')[0]!r}")
        known = self._peers.get(name)
        if known is not None and known[0] != metadata:
            raise ValueError(f"peer '{name}' is known with other metadata: a new life needs a new epoch in its name")
        self._peers[name] = (metadata, self._hub.sizes(name))

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        if self._peers.pop(name, None) is not None:
            self._hub.forget(self._name, name)

    def write(self, peer: str, pieces: Sequence[Pieces], notify: bytes | None) -> InProcessHandle:
        """Copy now, or as the hub's faults say."""
        if self._is_closed:
            return InProcessHandle(NotPosted(f"transfer '{self._name}' is closed"))
        if peer not in self._peers:
            return InProcessHandle(NotPosted(f"unknown peer '{peer}'; known: {sorted(self._peers)}"))
        self.metadata()
        sizes = {n: b.size for n, b in self._buffers.items()}
        for part in pieces:
            if fault := range_fault(part, sizes, self._peers[peer][1]):
                return InProcessHandle(NotPosted(fault))
        return self._hub.post(self._name, peer, pieces, notify)

    def poll(self) -> tuple[Notification, ...]:
        """Notifications that arrived."""
        return () if self._is_closed else self._hub.take(self._name)

    def close(self) -> None:
        """Leave the hub."""
        if self._is_closed:
            return
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._is_closed = True
        if self._metadata is not None:
            self._hub.lose(self._name)


def _copy(source: Buffer, target: Buffer, pieces: Pieces) -> None:
    for local, remote, length in pieces.spans.tolist():
        target[remote : remote + length] = source[local : local + length]
