"""What a person or a test wants to know of a running cluster, asked of its controller and members."""

from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from shoal.cluster.live.names import ENGINE_ROLES, controller_name
from shoal.cluster.live.session import NAMESPACE, SessionError

ASK_S = 5.0


def overview(cluster: str) -> dict[str, Any]:
    """Health, and for each member its name, epoch, state, process id and (engines) load; plain values."""
    try:
        controller = ray.get_actor(controller_name(cluster), namespace=NAMESPACE)
        view, handles = ray.get(controller.snapshot.remote(), timeout=ASK_S)
        health = ray.get(controller.health.remote(), timeout=ASK_S)
    except (ValueError, RayError) as error:
        raise SessionError(f"the controller of {cluster!r} does not answer: {error}; try again in a second") from error
    members = []
    for member in view.members:
        entry: dict[str, Any] = {"name": member.group.name, "epoch": member.group.epoch, "state": str(member.state)}
        if (handle := handles.get(member.group)) is not None:
            entry |= _ask(handle, member.role in ENGINE_ROLES)
        members.append(entry)
    return {"healthy": health.good, "reasons": list(health.reasons), "view": view.number, "members": members}


def _ask(handle: Any, is_engine: bool) -> dict[str, Any]:
    """What the member itself says; nothing if it does not answer."""
    try:
        found: dict[str, Any] = {"pid": ray.get(handle.pid.remote(), timeout=ASK_S)}
        if is_engine:
            status = ray.get(handle.status.remote(), timeout=ASK_S)
            load = asdict(status["capacity"]) | {"sequences": status["sequences"], "tickets": status["tickets"]}
            found |= {"load": load, "implementations": status["implementations"], "counters": dict(status["counters"])}
    except (RayError, GetTimeoutError):
        return {}
    return found
