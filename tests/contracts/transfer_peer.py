"""The other end of a transfer under test: in this process over the hub, or another process over NIXL."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash
from shoal.cluster.core.transfer_plan import Pieces
from shoal.cluster.live.transfer_in_process import InProcessHub, InProcessTransfer
from shoal.cluster.transfer import Buffer, Pending, Transfer

POOL_BYTES = 32 << 20
REPLY_S = 30.0


class End:
    """A transfer with one buffer `pool`, driven by plain values so that it also works through a pipe."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.pool: Buffer = np.zeros(POOL_BYTES, np.uint8)
        transfer.register("pool", self.pool)
        self._seen: list[tuple[str, bytes]] = []

    def metadata(self) -> bytes:
        return self.transfer.metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        self.transfer.add_peer(name, metadata)

    def read(self, offset: int, length: int) -> bytes:
        return self.pool[offset : offset + length].tobytes()

    def digest(self, spans: list[tuple[int, int]]) -> int:
        whole = xxhash.xxh3_64()
        for offset, length in spans:
            whole.update(self.pool[offset : offset + length].data)
        return whole.intdigest()

    def fill(self, offset: int, raw: bytes) -> None:
        self.pool[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)

    def await_notes(self, count: int) -> list[tuple[str, bytes]]:
        deadline = time.monotonic() + 10
        while len(self._seen) < count and time.monotonic() < deadline:
            self._seen += [(n.peer, n.message) for n in self.transfer.poll()]
            time.sleep(0.0005)
        seen, self._seen = self._seen, []
        return seen

    def note_and_digest(self, spans: list[tuple[int, int]]) -> tuple[bytes, int]:
        """The digest taken the moment the first notification is seen."""
        [(_, message)] = self.await_notes(1)
        return message, self.digest(spans)

    def write(self, peer: str, spans: list[tuple[int, int, int]], notify: bytes | None) -> str:
        pieces = Pieces("pool", "pool", np.array(spans, np.int64).reshape(-1, 3))
        return type(self.transfer.write(peer, (pieces,), notify).wait(10)).__name__

    def close(self) -> None:
        self.transfer.close()


def serve(pipe: Any, name: str) -> None:
    """Body of the other process: one End over NIXL, answering (method, arguments) until None."""
    from shoal.cluster.live.transfer import NixlTransfer

    end = End(NixlTransfer(name))
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        method, arguments = call
        pipe.send(getattr(end, method)(*arguments))
    end.close()


class Remote(Protocol):
    """How the suite handles the other end."""

    name: str

    def call(self, method: str, *arguments: Any) -> Any: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> int: ...


@dataclass
class ProcessRemote:
    name: str
    process: Any = field(init=False)
    pipe: Any = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.name), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> "ProcessRemote":
        assert self.pipe.poll(REPLY_S), f"{self.name} did not start"
        assert self.pipe.recv() == "ready"
        return self

    def call(self, method: str, *arguments: Any) -> Any:
        self.pipe.send((method, arguments))
        assert self.pipe.poll(REPLY_S), f"{self.name} did not answer {method}"
        return self.pipe.recv()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def stop(self) -> int:
        """End the process in order; its exit code."""
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(REPLY_S)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        return code if code is not None else -1


class HubRemote:
    def __init__(self, name: str, hub: InProcessHub) -> None:
        self.name = name
        self.hub = hub
        self.end = End(InProcessTransfer(name, hub))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.end, method)(*arguments)

    def freeze(self) -> None:
        self.hub.freeze(self.name)

    def thaw(self) -> None:
        self.hub.thaw(self.name)

    def kill(self) -> None:
        self.hub.lose(self.name)

    def stop(self) -> int:
        self.end.close()
        return 0


class World:
    """Makes this process's End and any number of remote ones of one implementation."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.hub = InProcessHub()
        self.remotes: list[Remote] = []
        self._serial = 0
        self.here = self.end("here")

    def end(self, name: str) -> End:
        if self.implementation == "in process":
            return End(InProcessTransfer(name, self.hub))
        from shoal.cluster.live.transfer import NixlTransfer

        return End(NixlTransfer(name))

    def remote(self, role: str) -> Remote:
        """A fresh, introduced peer."""
        return self.introduce(self.start(role))

    def start(self, role: str) -> Remote:
        self._serial += 1
        name = f"{role}-{self._serial}"
        remote: Remote = HubRemote(name, self.hub) if self.implementation == "in process" else ProcessRemote(name)
        self.remotes.append(remote)
        return remote

    def introduce(self, remote: Remote) -> Remote:
        """Both ends know each other."""
        self._know(remote, freeze=False)
        remote.call("add_peer", "here", self.here.metadata())
        return remote

    def introduce_frozen(self, remote: Remote) -> Remote:
        """The remote end is stopped before either end knows the other: no connection can have come up."""
        self._know(remote, freeze=True)
        return remote

    def _know(self, remote: Remote, freeze: bool) -> None:
        if isinstance(remote, ProcessRemote):
            remote.ready()
        metadata = remote.call("metadata")
        if freeze:
            remote.freeze()
        self.here.add_peer(remote.name, metadata)

    def write(self, peer: str, spans: list[tuple[int, int, int]], notify: bytes | None = None) -> Any:
        pieces = Pieces("pool", "pool", np.array(spans, np.int64).reshape(-1, 3))
        return self.here.transfer.write(peer, (pieces,), notify)

    def await_end(self, handle: Any, timeout_s: float) -> Any:
        state = handle.wait(timeout_s)
        assert not isinstance(state, Pending), f"still pending after {timeout_s} s"
        return state

    def close(self) -> None:
        codes = {r.name: r.stop() for r in self.remotes if not getattr(r, "was_killed", False)}
        self.here.close()
        assert not any(codes.values()), f"a peer did not exit cleanly: {codes}"
