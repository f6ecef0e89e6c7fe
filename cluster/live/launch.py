"""Brings a cluster up on a connected Ray and takes it down again, telling how far it is."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from shoal.cluster.core.membership import MemberState, View
from shoal.cluster.live.clock import monotonic_s, sleep_s
from shoal.cluster.live.controller import Controller
from shoal.cluster.live.names import controller_name
from shoal.cluster.live.serving import deploy
from shoal.cluster.live.session import NAMESPACE, SessionError, is_listening, require_free
from shoal.cluster.live.spec import ClusterSpec

log = logging.getLogger(__name__)

READY_DEADLINE_S = 180.0
POLL_S = 0.1
DOWN_S = 20.0
DRAIN_S = 4.0
SERVE_NAMESPACE, SERVE_CONTROLLER, REPLICA_PREFIX = "serve", "SERVE_CONTROLLER_ACTOR", "SERVE_REPLICA::"


class LaunchError(SessionError):
    """A cluster that does not come up; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start is: members ready of those wanted, and what the newest step was."""

    ready: int
    wanted: int
    what: str


def start_controller(spec: ClusterSpec) -> Any:
    """Create the one actor with a fixed name; Ray restarts it for ever."""
    actor = ray.remote(Controller).options(
        name=controller_name(spec.name), namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=-1, max_concurrency=4096,
    )  # fmt: skip
    return actor.remote(spec)


def find_way(spec: ClusterSpec) -> ClusterSpec:
    """The spec for the connected Ray. LaunchError for a name, port or route that is taken there: nothing is started."""
    if spec.name in clusters():
        raise LaunchError(f"a cluster named {spec.name!r} is up already; `shoal down --name {spec.name}` ends it")
    host, port = spec.cluster.api.host, spec.cluster.api.port
    if not _actors(SERVE_NAMESPACE, SERVE_CONTROLLER):
        require_free(host, port)
        return replace(spec, owns_serve=True)
    if spec.name in serve.status().applications:
        raise LaunchError(f"Serve on that Ray has an application {spec.name!r} already; choose another name")
    if not is_listening(host, port):
        raise LaunchError(
            f"api.http = {host}:{port}: Serve on that Ray runs already and listens elsewhere; use its port"
        )
    return replace(spec, owns_serve=False)


def bring_up(spec: ClusterSpec, on_progress: Callable[[Progress], None] = lambda progress: None) -> None:
    """Start everything and return when a request would be answered. LaunchError after a deadline: take it down then."""
    wanted = sum(count for _, count in spec.desired) + 1
    Path(spec.run_dir).mkdir(parents=True, exist_ok=True, mode=0o700)  # the store holds what users said
    controller = start_controller(spec)
    on_progress(Progress(0, wanted, "controller"))
    ray.get(controller.ping.remote(), timeout=READY_DEADLINE_S)
    try:
        deploy(spec)
    except (RayServeException, RuntimeError) as error:  # another application's route, or replicas that do not start
        raise LaunchError(f"Serve does not run the entrypoints: {error}") from error
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
    """Stop a cluster on the connected Ray; the number of its actors that were stopped. Nothing of it stays.

    LaunchError if something of it is still there after a deadline.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    owns_serve = _end_controller(name)
    stopped = _kill_actors(NAMESPACE, f"{name}:")
    if _actors(SERVE_NAMESPACE, SERVE_CONTROLLER):
        _end_entrypoints(name)
        if owns_serve and not serve.status().applications:
            serve.shutdown()
    if not _comes_true(lambda: not _actors(NAMESPACE, f"{name}:"), DOWN_S):
        raise LaunchError(f"still there after {DOWN_S:.0f} s: {', '.join(_actors(NAMESPACE, f'{name}:'))}; try again")
    return stopped


def clusters() -> list[str]:
    """Names of the clusters that the connected Ray runs."""
    suffix = controller_name("")
    return sorted(n.removesuffix(suffix) for n in _actors(NAMESPACE, "") if n.endswith(suffix))


def spec_of(name: str) -> ClusterSpec | None:
    """What a running cluster was started from; None if its controller does not answer."""
    try:
        controller = ray.get_actor(controller_name(name), namespace=NAMESPACE)
        found: ClusterSpec = ray.get(controller.spec.remote(), timeout=DOWN_S)
    except (ValueError, RayError):
        return None
    return found


def _end_controller(name: str) -> bool:
    """Stop the controller after its members; whether this cluster started Serve."""
    spec = spec_of(name)
    try:
        controller = ray.get_actor(controller_name(name), namespace=NAMESPACE)
        ray.get(controller.shutdown.remote(), timeout=DOWN_S)
    except (ValueError, RayError) as error:
        log.warning("%s ends without its controller's help: %s", name, error)  # its members are found by name
    return spec is not None and spec.owns_serve


def _end_entrypoints(name: str) -> None:
    """Delete the Serve application. A Serve that we did not start may drain for 30 s: its replicas are then killed."""
    serve.delete(name, _blocking=False)
    if _comes_true(lambda: name not in serve.status().applications, DRAIN_S):
        return
    _kill_actors(SERVE_NAMESPACE, f"{REPLICA_PREFIX}{name}#")
    if not _comes_true(lambda: name not in serve.status().applications, DOWN_S):
        raise LaunchError(f"Serve still has application {name!r} after {DOWN_S:.0f} s; `serve status` says why")


def _actors(namespace: str, prefix: str) -> list[str]:
    """Names of living named actors of a namespace that begin with `prefix`."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in named if a["namespace"] == namespace and a["name"].startswith(prefix))


def _kill_actors(namespace: str, prefix: str) -> int:
    """Kill named actors by prefix; how many."""
    killed = 0
    for name in _actors(namespace, prefix):
        with contextlib.suppress(ValueError):  # ended meanwhile
            ray.kill(ray.get_actor(name, namespace=namespace))
            killed += 1
    return killed


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds within so many seconds."""
    deadline_s = monotonic_s() + seconds
    while not condition():
        if monotonic_s() > deadline_s:
            return False
        sleep_s(POLL_S)
    return True


def _answers(spec: ClusterSpec) -> bool:
    try:
        answer = httpx.get(f"http://{spec.cluster.api.host}:{spec.cluster.api.port}/ready", timeout=2.0)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _missing(view: View) -> str:
    starting = [m.group.name for m in view.members if m.state is not MemberState.READY]
    return f"waiting for {', '.join(starting[:4])}{' …' if len(starting) > 4 else ''}" if starting else "entrypoint"
