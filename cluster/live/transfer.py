"""The transfer port over NIXL and UCX: RDMA, shared memory (CMA) or TCP between processes.

NIXL has no progress thread here (see `nixl_agent`), so a poller calls into the agent: without it neither this side's
writes nor those of peers into this side end. The Python wrapper is not synchronised; one lock guards the agent.
"""

import base64
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from shoal.cluster.core.transfer_plan import Pieces
from shoal.cluster.live.nixl_agent import open_agent
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

# A poll costs about 15 us: 3.5 % of a core at this pace (measured), and a small write's latency is one interval.
POLL_S = 0.0005
IDLE_POLL_S = 0.004
IDLE_AFTER_S = 0.5
CLOSE_WAIT_S = 5.0
_CALLER_POLL_S = 0.0001

_log = logging.getLogger(__name__)


class NixlHandle:
    """A write posted to the agent, or refused before."""

    def __init__(self, owner: "NixlTransfer", state: WriteState) -> None:
        self._owner = owner
        self._state = state

    def state(self) -> WriteState:
        """The state as of the last progress."""
        return self._state

    def wait(self, timeout_s: float) -> WriteState:
        """The state at its end or after `timeout_s`; the waiting thread drives progress itself."""
        deadline = time.monotonic() + timeout_s
        while isinstance(self._state, Pending):
            self._owner.progress()
            left = deadline - time.monotonic()
            if left <= 0 or not isinstance(self._state, Pending):
                break
            time.sleep(min(left, _CALLER_POLL_S))
        return self._state

    def end(self, state: WriteState) -> None:
        """For the owner, under its lock: the first end counts."""
        if isinstance(self._state, Pending):
            self._state = state


@dataclass(frozen=True, slots=True)
class _Peer:
    metadata: bytes
    bases: dict[str, int]
    sizes: dict[str, int]


@dataclass(slots=True)
class _Flight:
    peer: str
    nixl: Any
    handle: NixlHandle


class NixlTransfer:
    """One NIXL agent and its poller thread. `name` is `Group.agent`: never reused by a later life."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._agent: Any
        self._agent, self._errors = open_agent(name)
        self._lock = threading.RLock()
        self._buffers: dict[str, Buffer] = {}
        self._registrations: list[Any] = []
        self._metadata: bytes | None = None
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, str] = {}
        self._flights: list[_Flight] = []
        self._arrived: deque[Notification] = deque()
        self._is_closed = False
        self._busy_until_s = 0.0
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll_on, name=f"nixl-{name}", daemon=True)
        self._poller.start()

    def register(self, name: str, buffer: Buffer) -> None:
        """Let peers write into `buffer`."""
        check_buffer(name, buffer)
        with self._lock:
            if self._is_closed or self._metadata is not None or name in self._buffers:
                raise ValueError(f"buffer '{name}' must be registered once and before metadata() is taken")
            self._registrations.append(self._agent.register_memory([(buffer.ctypes.data, buffer.size, 0, "")], "DRAM"))
            self._buffers[name] = buffer

    def metadata(self) -> bytes:
        """Agent metadata with the addresses of the buffers."""
        with self._lock:
            if self._metadata is None:
                if self._is_closed:
                    raise ValueError(f"transfer '{self._name}' is closed")
                agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
                buffers = {n: (b.ctypes.data, b.size) for n, b in self._buffers.items()}
                self._metadata = json.dumps({"name": self._name, "buffers": buffers, "agent": agent}).encode()
            return self._metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Know a peer by the metadata it sent."""
        fields = json.loads(metadata)
        if fields["name"] != name:
            raise ValueError(f"metadata is not of peer '{name}' but of '{fields['name']}'")
        with self._lock:
            known = self._peers.get(name)
            if known is not None and known.metadata != metadata:
                raise ValueError(
                    f"peer '{name}' is known with other metadata: a new life needs a new epoch in its name"
                )
            if known is not None or self._is_closed:
                return
            self._agent.add_remote_agent(base64.b64decode(fields["agent"]))
            bases = {n: int(base) for n, (base, _) in fields["buffers"].items()}
            sizes = {n: int(size) for n, (_, size) in fields["buffers"].items()}
            self._peers[name] = _Peer(metadata, bases, sizes)

    def remove_peer(self, name: str) -> None:
        """Forget a peer; its pending writes end as Lost."""
        with self._lock:
            if self._peers.pop(name, None) is None:
                return
            self._lose(name, f"peer '{name}' was removed")
            del self._lost[name]
            self._attempt(self._agent.remove_remote_agent, name)

    def write(self, peer: str, pieces: Sequence[Pieces], notify: bytes | None) -> NixlHandle:
        """Post one write, or one notification if there are no bytes; costs microseconds for each piece."""
        handle = NixlHandle(self, Pending())
        with self._lock:
            handle.end(self._start(peer, pieces, notify, handle))
            self._busy_until_s = time.monotonic() + IDLE_AFTER_S
        return handle

    def poll(self) -> tuple[Notification, ...]:
        """Notifications that arrived; makes progress first."""
        self.progress()
        with self._lock:
            arrived = tuple(self._arrived)
            self._arrived.clear()
            return arrived

    def progress(self) -> None:
        """Call into the agent once: collect notifications, end writes."""
        with self._lock:
            if self._is_closed:
                return
            found = self._attempt(self._agent.get_new_notifs)
            if isinstance(found, dict):
                for peer, messages in found.items():
                    self._arrived.extend(Notification(peer, message) for message in messages)
                if found or self._flights:
                    self._busy_until_s = time.monotonic() + IDLE_AFTER_S
            for flight in list(self._flights):
                self._look_at(flight)

    def close(self) -> None:
        """Stop the poller, end what is pending as Lost, deregister, drop the agent."""
        self._stop.set()
        self._poller.join(CLOSE_WAIT_S)
        with self._lock:
            if self._is_closed:
                return
            for peer in list(self._peers):
                self.remove_peer(peer)
            for registration in self._registrations:
                self._attempt(self._agent.deregister_memory, registration)
            self._is_closed = True
            self._arrived.clear()
            self._registrations.clear()
            self._buffers.clear()
            self._agent = None

    def _start(self, peer: str, pieces: Sequence[Pieces], notify: bytes | None, handle: NixlHandle) -> WriteState:
        if self._is_closed:
            return NotPosted(f"transfer '{self._name}' is closed")
        known = self._peers.get(peer)
        if known is None:
            return NotPosted(f"unknown peer '{peer}'; known: {sorted(self._peers)}")
        if peer in self._lost:
            return Lost(self._lost[peer])
        sizes = {n: b.size for n, b in self._buffers.items()}
        for part in pieces:
            if fault := range_fault(part, sizes, known.sizes):
                return NotPosted(fault)
        pieces = [p for p in pieces if len(p.spans)]
        if not pieces:
            return self._notify_only(peer, notify)
        return self._post(peer, known, pieces, notify, handle)

    def _post(
        self, peer: str, known: _Peer, pieces: Sequence[Pieces], notify: bytes | None, handle: NixlHandle
    ) -> WriteState:
        local = np.concatenate([_descriptors(p, 0, self._buffers[p.local].ctypes.data) for p in pieces])
        remote = np.concatenate([_descriptors(p, 1, known.bases[p.remote]) for p in pieces])
        agent, message = self._agent, notify or b""
        try:
            descriptors = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
            request = agent.initialize_xfer("WRITE", *descriptors, peer, message)
        except self._errors as error:
            return NotPosted(f"NIXL refuses the write to '{peer}': {_say(error)}")
        flight = _Flight(peer, request, handle)
        try:
            status = agent.transfer(request, message) if message else agent.transfer(request)
        except self._errors as error:
            status = _say(error)
        return self._judge(flight, status)

    def _notify_only(self, peer: str, notify: bytes | None) -> WriteState:
        if notify is not None:
            try:
                self._agent.send_notif(peer, notify)
            except self._errors as error:
                self._lose(peer, f"peer '{peer}': {_say(error)}")
                return Lost(self._lost[peer])
        return Done()

    def _look_at(self, flight: _Flight) -> None:
        if flight not in self._flights:
            return  # lost together with an earlier flight of the same peer
        try:
            status = self._agent.check_xfer_state(flight.nixl)
        except self._errors as error:
            status = _say(error)
        flight.handle.end(self._judge(flight, status))

    def _judge(self, flight: _Flight, status: str) -> WriteState:
        """The flight's state by NIXL's word; keeps it among the flights exactly while it is pending."""
        if status == "PROC":
            if flight not in self._flights:
                self._flights.append(flight)
            return Pending()
        if flight in self._flights:
            self._flights.remove(flight)
        self._attempt(flight.nixl.release)
        if status == "DONE":
            return Done()
        self._lose(flight.peer, f"peer '{flight.peer}': {status}")
        return Lost(self._lost[flight.peer])

    def _lose(self, peer: str, reason: str) -> None:
        self._lost.setdefault(peer, reason)
        for flight in [f for f in self._flights if f.peer == peer]:
            self._flights.remove(flight)
            self._attempt(flight.nixl.release)
            flight.handle.end(Lost(reason))

    def _attempt(self, call: Any, *arguments: Any) -> Any:
        """Call, or None after a logged failure: for steps that a peer's death may break and nothing depends on."""
        try:
            return call(*arguments)
        except self._errors as error:
            _log.warning("%s: %s failed: %s", self._name, getattr(call, "__name__", call), _say(error))
            return None

    def _poll_on(self) -> None:
        pause = POLL_S
        while not self._stop.wait(pause):
            self.progress()
            pause = POLL_S if time.monotonic() < self._busy_until_s else IDLE_POLL_S


def _descriptors(pieces: Pieces, column: int, base: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """(address, bytes, device 0) rows as NIXL takes them."""
    rows = np.zeros((len(pieces.spans), 3), np.uint64)
    rows[:, 0] = pieces.spans[:, column].astype(np.uint64) + np.uint64(base)
    rows[:, 1] = pieces.spans[:, 2].astype(np.uint64)
    return rows


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
