"""Opening a NIXL agent: which wheel, which UCX settings, and what is refused because it crashes or hangs."""

import importlib
import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

WHEELS = ("nixl_cu13", "nixl_cu12")
RDMA_DEVICES = Path("/sys/class/infiniband")
NO_RDMA_MODULES = "^ib"

_log = logging.getLogger(__name__)


class TransferSetupError(RuntimeError):
    """The transfer cannot start on this machine as it is configured; says what to change."""


def has_rdma(devices: Path = RDMA_DEVICES) -> bool:
    """Whether the kernel knows an RDMA device."""
    return devices.is_dir() and any(devices.iterdir())


def prepare_ucx(environment: MutableMapping[str, str], is_rdma: bool, is_loaded: bool) -> str:
    """Set what UCX needs before its first import and return what was done, for the log; "" if nothing.

    Without an RDMA device UCX's `ib` module crashes each process at exit, in libnl-route's destructor (seen with
    NIXL 1.5.1, both wheels). TCP must stay in UCX_TLS: shared memory alone has no peer failure detection, so a killed
    peer would hang its transfers for ever. Raises TransferSetupError where a setting stands in the way.
    """
    transports = environment.get("UCX_TLS", "")
    if transports and transports != "all" and "tcp" not in transports.split(",") and not is_rdma:
        raise TransferSetupError(
            f"UCX_TLS = {transports} must include tcp: without it a dead peer is never noticed; unset UCX_TLS"
        )
    modules = environment.get("UCX_MODULES")
    if is_rdma or modules == NO_RDMA_MODULES:
        return ""
    remedy = f"set UCX_MODULES={NO_RDMA_MODULES} before the process (and Ray's workers) start"
    if modules is not None:
        raise TransferSetupError(f"UCX_MODULES = {modules}, but there is no RDMA device: {remedy}")
    if is_loaded:
        raise TransferSetupError(f"NIXL was imported before UCX_MODULES was set and there is no RDMA device: {remedy}")
    environment["UCX_MODULES"] = NO_RDMA_MODULES
    return f"no RDMA device in {RDMA_DEVICES}: UCX_MODULES was unset, now {NO_RDMA_MODULES}"


def open_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A NIXL agent and the exceptions its calls raise: UCX backend, peer failure handling, no progress thread.

    NIXL's progress thread takes half a core for each idle agent and makes transfers slower on small machines
    (measured, NIXL 1.5.1), so the owner must call into the agent regularly. Raises TransferSetupError.
    """
    is_loaded = any(wheel in sys.modules for wheel in WHEELS)
    if done := prepare_ucx(os.environ, has_rdma(), is_loaded):
        _log.warning(done)
    faults = []
    for wheel in WHEELS:
        try:
            nixl = importlib.import_module(f"{wheel}._api")
        except ImportError as error:
            faults.append(f"{wheel}: {error}")
            continue
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        return agent, errors_of(importlib.import_module(f"{wheel}._bindings"))
    raise TransferSetupError(f"no NIXL wheel can be imported ({'; '.join(faults)}); install nixl-cu13 or nixl-cu12")


def errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """The exception classes of NIXL's bindings; they share no base but Exception."""
    found = [vars(bindings)[name] for name in sorted(vars(bindings)) if name.startswith("nixl")]
    return tuple(c for c in found if isinstance(c, type) and issubclass(c, Exception))
