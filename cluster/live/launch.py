"""Brings a cluster up on a connected Ray and takes it down again, telling how far it is."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from shoal.cluster.core.membership import MemberState, View
from shoal.cluster.live.clock import monotonic_s, sleep_s
from shoal.cluster.live.controller import Controller
from shoal.cluster.live.names import controller_name, parse_actor_name
from shoal.cluster.live.serving import deploy
from shoal.cluster.live.session import NAMESPACE, SessionError
from shoal.cluster.live.spec import ClusterSpec

READY_DEADLINE_S = 180.0
POLL_S = 0.1
DOWN_S = 20.0


class LaunchError(SessionError):
    """A cluster that does not come up; the message names what is missing."""


class NameTakenError(LaunchError):
    """Another cluster of this name runs on that Ray; nothing was started."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start is: members ready of those wanted, and what the newest step was."""

    ready: int
    wanted: int
    what: str


def start_controller(spec: ClusterSpec) -> Any:
    """Create the one actor with a fixed name; Ray restarts it for ever. Refuses a cluster of that name that runs."""
    try:
        ray.get_actor(controller_name(spec.name), namespace=NAMESPACE)
    except ValueError:
        pass
    else:
        raise NameTakenError(f"a cluster named {spec.name!r} is up already; `shoal down --name {spec.name}` ends it")
    actor = ray.remote(Controller).options(
        name=controller_name(spec.name), namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=-1, max_concurrency=4096,
    )  # fmt: skip
    return actor.remote(spec)


def bring_up(spec: ClusterSpec, on_progress: Callable[[Progress], None] = lambda progress: None) -> None:
    """Start everything and return when a request would be answered. LaunchError after a deadline."""
    wanted = sum(count for _, count in spec.desired) + 1
    Path(spec.run_dir).mkdir(parents=True, exist_ok=True, mode=0o700)  # the store holds what users said
    controller = start_controller(spec)
    on_progress(Progress(0, wanted, "controller"))
    ray.get(controller.ping.remote(), timeout=READY_DEADLINE_S)
    try:
        deploy(spec)
    except RuntimeError as error:  # Serve's word for an application that cannot be built
        raise LaunchError(f"the HTTP side does not start: {error}") from error
    deadline_s = monotonic_s() + READY_DEADLINE_S
    while True:
        view = ray.get(controller.view.remote(), timeout=READY_DEADLINE_S)
        ready = sum(member.state is MemberState.READY for member in view.members)
        is_answering = _answers(spec)
        on_progress(Progress(ready + is_answering, wanted, _missing(view)))
        if is_answering:
            return
        is_late = monotonic_s() > deadline_s
        if is_late or any(member.state is MemberState.FAILED for member in view.members):
            health = ray.get(controller.health.remote(), timeout=READY_DEADLINE_S)
            what = f"not ready after {READY_DEADLINE_S:.0f} s" if is_late else "a member fails again and again"
            raise LaunchError(f"{what}: {'; '.join(health.reasons) or 'no HTTP'}")
        sleep_s(POLL_S)


def take_down(name: str) -> int:
    """Stop a cluster on the connected Ray; the number of members that were stopped. Nothing of it stays."""
    try:
        controller = ray.get_actor(controller_name(name), namespace=NAMESPACE)
        stopped: int = ray.get(controller.shutdown.remote(), timeout=DOWN_S)
        ray.kill(controller)
    except (ValueError, RayError):
        stopped = _kill_members(name)
    try:
        serve.delete(name)
    except RayError:
        return stopped
    return stopped


def _kill_members(name: str) -> int:
    """End what a controller that is gone, or does not answer, has left; the number of actors that were ended."""
    stopped = 0
    for entry in ray.util.list_named_actors(all_namespaces=True):
        is_ours = entry["name"] == controller_name(name) or parse_actor_name(name, entry["name"]) is not None
        if entry["namespace"] == NAMESPACE and is_ours:
            with contextlib.suppress(ValueError):  # it has just gone
                ray.kill(ray.get_actor(entry["name"], namespace=NAMESPACE))
                stopped += 1
    return stopped


def clear_run_dir(spec: ClusterSpec) -> None:
    """Delete what a cluster kept on disk: its store."""
    shutil.rmtree(spec.run_dir, ignore_errors=True)


def _answers(spec: ClusterSpec) -> bool:
    try:
        answer = httpx.get(f"http://{spec.cluster.api.host}:{spec.cluster.api.port}/ready", timeout=2.0)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _missing(view: View) -> str:
    starting = [m.group.name for m in view.members if m.state is not MemberState.READY]
    return f"waiting for {', '.join(starting[:4])}{' …' if len(starting) > 4 else ''}" if starting else "entrypoint"
