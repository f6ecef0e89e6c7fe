"""Where steps are computed: work is launched in order and reached through its event, by a thread or a CUDA stream."""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar, cast

import torch
from shoal.engines.run.sync_guard import CUDA_GUARD, EarlyReadError, HostGuard
from torch import Tensor

T = TypeVar("T")


class Event(Protocol):
    """Happens when the device has done what was launched up to it."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def synchronize(self) -> None:
        """Block until it has."""
        ...


class BrokenDeviceError(RuntimeError):
    """Work launched earlier on this device failed, so what follows it would compute on half-made memory."""


class Launched(Generic[T]):
    """Work that a device was given. Its result is there for later work at once, for the host by its event."""

    def __init__(self, event: Event, is_inside: Callable[[], bool]) -> None:
        self._event = event
        self._is_inside = is_inside
        self._has_run = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], T], broken_by: BaseException | None) -> BaseException | None:
        """For the device: do the work, unless earlier work failed; returns what the device is broken by, if it is."""
        try:
            if broken_by is not None:
                raise BrokenDeviceError("work launched earlier on this device failed") from broken_by
            self._value = work()
        except BaseException as error:  # the host gets it where it asks for the result
            self._error = error
        self._has_run = True
        return broken_by or self._error

    @property
    def is_done(self) -> bool:
        """Whether the device has computed it."""
        return self._event.query()

    def wait(self) -> T:
        """Block until it is computed. Raises what the work raised, BrokenDeviceError if it was not even begun."""
        self._event.synchronize()
        return self._get()

    def result(self) -> T:
        """As `wait` but without blocking. Raises EarlyReadError if it is not computed yet."""
        if not self.is_done:
            raise EarlyReadError("the result of launched work was asked for before its event: call wait()")
        return self._get()

    def on_device(self) -> T:
        """For work launched later on the same device, whose turn comes when this is computed.

        Raises EarlyReadError outside such work, and what the work raised.
        """
        if not (self._is_inside() and self._has_run):
            raise EarlyReadError("on_device() is for work launched behind this one: the host calls wait()")
        return self._get()

    def _get(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Device(Protocol):
    """Does launched work in the order of launching, while the host goes on. One thread launches."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Queue work behind all that was launched before. What it raises comes out of the result, and nothing launched
        behind it is begun."""
        ...

    def forbid_sync(self) -> AbstractContextManager[None]:
        """Inside, reading a tensor that the device may be computing raises EarlyReadError. Events may be waited for."""
        ...

    def allow_sync(self) -> AbstractContextManager[None]:
        """Inside, reading is meant, whatever region surrounds it or another thread is in."""
        ...

    def close(self) -> None:
        """Finish what was launched; then nothing more may be."""
        ...


def host_copy(tensor: Tensor) -> Tensor:
    """For launched work: a copy in host memory, complete at the work's event, that no later work overwrites."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


class _ThreadEvent:
    def __init__(self) -> None:
        self._set = threading.Event()
        self.query = self._set.is_set
        self.happen = self._set.set

    def synchronize(self) -> None:
        self._set.wait()


class HostDevice:
    """One worker thread. torch's operations release the interpreter lock, so the host's Python runs meanwhile."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._guard = HostGuard()
        self._broken_by: BaseException | None = None
        self._is_closed = False
        self._worker = threading.Thread(target=self._run, name="device", daemon=True)
        self._worker.start()

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """See Device."""
        if self._is_closed:
            raise ValueError("work was launched on a closed device: launch before close()")
        event = _ThreadEvent()
        launched: Launched[T] = Launched(event, lambda: threading.current_thread() is self._worker)

        def turn() -> None:
            self._broken_by = launched.run(work, self._broken_by)
            event.happen()

        self._queue.put(turn)
        return launched

    def forbid_sync(self) -> AbstractContextManager[None]:
        """See Device."""
        return self._guard.forbid()

    def allow_sync(self) -> AbstractContextManager[None]:
        """See Device."""
        return self._guard.allow()

    def close(self) -> None:
        """See Device."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._worker.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # per thread, and engines never differentiate
        while (turn := self._queue.get()) is not None:
            turn()
            del turn  # what the work held is released now, not when the next comes


class CudaDevice:
    """The stream that is current where the device is made, so that the caller's own tensors are in its order too."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._broken_by: BaseException | None = None
        self._is_launching = False
        self._is_closed = False

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """See Device."""
        if self._is_closed:
            raise ValueError("work was launched on a closed device: launch before close()")
        event = torch.cuda.Event()
        launched: Launched[T] = Launched(event, lambda: self._is_launching)
        self._is_launching = True
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                self._broken_by = launched.run(work, self._broken_by)
                event.record(self._stream)
        finally:
            self._is_launching = False
        return launched

    def forbid_sync(self) -> AbstractContextManager[None]:
        """See Device."""
        return CUDA_GUARD.forbid()

    def allow_sync(self) -> AbstractContextManager[None]:
        """See Device."""
        return CUDA_GUARD.allow()

    def close(self) -> None:
        """See Device."""
        self._is_closed = True
        self._stream.synchronize()
