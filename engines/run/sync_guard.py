"""Forbid and allow that the host reads what the device may still be computing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shoal.engines.core.sync_intents import Intent, SyncIntents, SyncMode
from torch import Tensor
from torch.overrides import TorchFunctionMode

REMEDY = "wait for the event of the step that computes it, or say allow_sync where waiting is meant"

# How the values of a tensor reach Python, or decide a shape or a branch: on CUDA each of them makes the host wait.
READS = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__repr__, Tensor.__format__),
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
        *(Tensor.is_nonzero, Tensor.equal, Tensor.allclose, Tensor.nonzero, Tensor.unique, Tensor.masked_select),
        *(torch.is_nonzero, torch.equal, torch.allclose, torch.nonzero, torch.unique, torch.masked_select),
    }
)


class EarlyReadError(RuntimeError):
    """The host read what the device may still be computing."""


class SyncGuard:
    """Arbiter of the mode that regions of several threads want; `apply` sets it, `found` reads it."""

    def __init__(self, apply: Callable[[SyncMode], None], found: Callable[[], SyncMode]) -> None:
        self._apply = apply
        self._found = found
        self._intents = SyncIntents()
        self._lock = threading.Lock()

    @contextmanager
    def region(self, intent: Intent) -> Iterator[None]:
        """The calling thread has this intent inside; regions nest."""
        thread = threading.get_ident()
        with self._lock:
            self._apply(self._intents.enter(thread, intent, self._found()))
        try:
            yield
        finally:
            with self._lock:
                self._apply(self._intents.leave(thread))


class HostGuard:
    """For tensors in host memory, where a read never waits and so reads half-made values: any read in a region raises.

    Which tensor is whose cannot be seen, so inside a region that forbids nothing is read, as on the launch path of
    CUDA nothing needs to be. Regions concern the threads that enter them; work that was launched runs in none.
    """

    def __init__(self) -> None:
        self._mode = SyncMode.DEFAULT
        self._guard = SyncGuard(self._set, lambda: self._mode)

    @contextmanager
    def forbid(self) -> Iterator[None]:
        """Reading a tensor on this thread raises EarlyReadError inside."""
        with self._guard.region(Intent.FORBID), _Reads(lambda: self._mode):
            yield

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Reading is meant: nobody's `forbid` counts while this lasts."""
        with self._guard.region(Intent.ALLOW):
            yield

    def _set(self, mode: SyncMode) -> None:
        self._mode = mode


class _Reads(TorchFunctionMode):
    """Looks at each torch call of one thread."""

    def __init__(self, mode: Callable[[], SyncMode]) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self._mode() is SyncMode.ERROR:
            raise EarlyReadError(f"{func.__name__} of a tensor where waiting for the device is forbidden: {REMEDY}")
        return func(*args, **(kwargs or {}))


class CudaGuard:
    """torch's own check of synchronising CUDA calls; its mode is the process's, so there is one guard: `CUDA_GUARD`."""

    def __init__(self) -> None:
        self._guard = SyncGuard(
            lambda mode: torch.cuda.set_sync_debug_mode(mode.value),
            lambda: tuple(SyncMode)[torch.cuda.get_sync_debug_mode()],
        )

    @contextmanager
    def forbid(self) -> Iterator[None]:
        """A CUDA call that makes the host wait raises inside; it leaves the region as EarlyReadError."""
        with self._guard.region(Intent.FORBID):
            try:
                yield
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                raise EarlyReadError(f"{error}: {REMEDY}") from error

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Waiting is meant: nobody's `forbid` counts while this lasts."""
        with self._guard.region(Intent.ALLOW):
            yield


CUDA_GUARD = CudaGuard()
