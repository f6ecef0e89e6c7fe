"""Which Ray a command talks to: start one of our own, remember it, connect to it, stop exactly it.

An own Ray is one `ray start --head --block` process in its own session, guarded by a random token, so that stopping
it touches no other Ray on the machine (`ray stop` would stop them all). The record of a running cluster is a file that
only its owner can read, since it holds the token. Ray reads its authentication mode once, when it is first imported:
hence the imports inside functions here, and the check in `_use_token`.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil
from shoal.cluster.live.clock import monotonic_s, sleep_s

import shoal

NAMESPACE = "shoal"
SAME_BIRTH_S = 5.0  # creation times are derived from the clock, which may have been set since
SESSION_MARK = "SHOAL_SESSION_MARK"  # in the environment of every process of an own Ray, whoever its parent became
START_DEADLINE_S = 60.0
CONNECT_DEADLINE_S = 5.0
# What of a checkout no worker imports. Ray refuses a working directory above 250 MB.
NOT_SENT = ["/.venv", "/.git", "/.typing", "/tests", "/build", "/dist", "/run", "__pycache__", "*.egg-info", "*.log"]
STOP_DEADLINE_S = 4.0  # what Ray itself needs when nothing runs is below 2 s; the rest is killed
# Ray's defaults notice a lost node after 13 s or more; these after about 2 s (measured on two cores).
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


class SessionError(Exception):
    """A Ray that cannot be started, found or reached; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Session:
    """A running cluster as this user's commands find it again. `pid` 0: somebody else's Ray, never stopped by us.

    `born_s` is when process `pid` was created: another process may get the same number, after a reboot for example.
    """

    name: str
    address: str
    token: str = ""
    pid: int = 0
    mark: str = ""
    http: str = ""
    born_s: float = 0.0


def checkout_root() -> Path:
    """The folder that holds `shoal/`, for workers of an own Ray to import from."""
    return Path(shoal.__file__).resolve().parent.parent


def state_dir() -> Path:
    """Where session records live: `$SHOAL_STATE_DIR`, else the user's XDG state folder."""
    base = os.environ.get("SHOAL_STATE_DIR") or os.path.join(
        os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "shoal"
    )
    path = Path(base)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def record(session: Session) -> None:
    """Remember a running cluster, readable by this user alone, replaced atomically."""
    target = state_dir() / f"{session.name}.json"
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{session.name}.")
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(session), file)
    os.replace(scratch, target)


def forget(name: str) -> None:
    """Drop the record of a cluster."""
    (state_dir() / f"{name}.json").unlink(missing_ok=True)


def sessions() -> list[Session]:
    """Recorded clusters whose own Ray still runs; records of dead ones are dropped."""
    found = []
    for path in sorted(state_dir().glob("*.json")):
        try:
            session = msgspec.json.decode(path.read_bytes(), type=Session)
        except msgspec.DecodeError:
            path.unlink(missing_ok=True)
            continue
        if not is_running(session):
            path.unlink(missing_ok=True)
            continue
        found.append(session)
    return found


def is_running(session: Session) -> bool:
    """Whether an own Ray's process is there; of somebody else's Ray it is taken for granted."""
    if not session.pid:
        return True
    try:
        head = _head(session)
        return head is not None and head.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find(name: str | None) -> Session:
    """The recorded cluster of that name, or the only one."""
    running = sessions()
    matches = [s for s in running if name is None or s.name == name]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(s.name for s in running) or "none"
    if name is not None:
        raise SessionError(f"no cluster named {name!r} is up (running: {names}); `shoal up MANIFEST` starts one")
    if not running:
        raise SessionError("no cluster is up; `shoal up manifests/local.yaml` starts one")
    raise SessionError(f"several clusters are up ({names}); say which with --name")


def _head(session: Session) -> psutil.Process | None:
    """The process of an own Ray; None when it has ended, even if its number belongs to another process by now."""
    try:
        process = psutil.Process(session.pid)
        is_same = abs(process.create_time() - session.born_s) < SAME_BIRTH_S
    except psutil.Error:
        return None
    return process if is_same else None


def require_free(host: str, port: int) -> None:
    """Raise SessionError if somebody listens on this address: another server would answer for ours."""
    try:
        where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(where[0], where[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where[4])
    except OSError as error:
        raise SessionError(
            f"cannot listen on {host}:{port} ({error.strerror}); is another cluster or server using it? "
            "Choose another address in the manifest: api.http"
        ) from error


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def worker_environment() -> dict[str, str]:
    """What the processes of an own Ray need to see, besides the caller's environment.

    HAProxy in front of Serve: 1.2 ms a request, against 5.3 ms with the default proxy (measured). UCX's `ib` module
    crashes at exit on machines without RDMA, so it is left out there.
    """
    settings = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),  # fixed ports by default: two clusters would collide
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # A proxy that is slow to start on a busy machine is killed after 5 s by default, and the start fails with it.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(checkout_root()), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
    }
    if "UCX_MODULES" not in os.environ and not os.path.isdir("/sys/class/infiniband"):
        settings["UCX_MODULES"] = "^ib"
    return settings


def start_ray(name: str, object_store_bytes: int, on_wait: Callable[[], None] = lambda: None) -> Session:
    """Start an own single-node Ray and connect this process to it."""
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    os.environ.update(worker_environment())
    _use_token(token)
    address, mark = f"127.0.0.1:{free_port()}", secrets.token_hex(8)
    log = tempfile.NamedTemporaryFile("w+", prefix=f"shoal-{name}-ray-", suffix=".log", delete=False)  # noqa: SIM115
    process = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1", "--include-dashboard=false",
            "--num-cpus=256", f"--object-store-memory={object_store_bytes}",
            f"--system-config={json.dumps(HEALTH_CHECKS)}",
        ],
        stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {SESSION_MARK: mark, "RAY_TMPDIR": str(_ray_dir())},
    )  # fmt: skip
    born_s = psutil.Process(process.pid).create_time()
    session = Session(name=name, address=address, token=token, pid=process.pid, mark=mark, born_s=born_s)
    try:
        _wait_for_ray(session, process, log.name, on_wait)
    except BaseException:  # Ctrl-C, too
        stop_ray(session)
        raise
    return session


def _wait_for_ray(
    session: Session, process: "subprocess.Popen[bytes]", log_name: str, on_wait: Callable[[], None]
) -> None:
    address, deadline = session.address, monotonic_s() + START_DEADLINE_S
    while True:
        on_wait()
        if process.poll() is not None:
            raise SessionError(f"ray start ended with code {process.returncode}; see {log_name}")
        if _port_open(address):
            try:
                return connect(session)
            except SessionError:
                if monotonic_s() > deadline:
                    raise
        elif monotonic_s() > deadline:
            raise SessionError(f"ray did not listen on {address} in {START_DEADLINE_S:.0f} s; see {log_name}")


def _ray_dir() -> Path:
    """Where own Rays keep their sessions and logs.

    Not Ray's /tmp/ray: the newest Ray there is the one that any other Ray's jobs on this machine are sent to.
    """
    path = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _use_token(token: str) -> None:
    """Make this process speak to a Ray guarded by `token`."""
    late = "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token"
    assert not late, "ray was imported before its authentication mode was set; set RAY_AUTH_MODE=token first"
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})


def is_listening(host: str, port: int) -> bool:
    """Whether somebody listens; waits at most 0.2 s."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            return probe.connect_ex((host, port)) == 0
        except OSError as error:
            raise SessionError(f"{host} is not a host name that can be resolved: {error}") from error


def _port_open(address: str) -> bool:
    """Whether somebody listens on host:port; waits a little if nobody does."""
    host, _, port = address.rpartition(":")
    if is_listening(host, int(port)):
        return True
    sleep_s(0.1)
    return False


def connect(session: Session, *, working_dir: Path | None = None) -> None:
    """Connect this process to a session's Ray, sending `working_dir` to its workers; a second call is a no-op.

    SessionError if nobody listens there, the token is refused, or the folder cannot be sent.
    """
    if session.token:
        _use_token(session.token)
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    await_port(session.address)
    try:
        ray.init(
            address=session.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"working_dir": str(working_dir), "excludes": NOT_SENT} if working_dir else None,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SessionError(
            f"Ray at {session.address} cannot be used: {reason}; its token belongs in RAY_AUTH_TOKEN"
        ) from error


def await_port(address: str) -> None:
    """Wait until somebody listens on host:port or scheme://host:port; SessionError after a deadline.

    `ray.init` itself waits for more than ten minutes for an address where nobody listens. Words that Ray resolves by
    itself ("auto") are left to it.
    """
    where = address.rpartition("://")[2]
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal():
        if where in ("auto", "local"):
            return
        raise SessionError(f"--address = {address} must be host:port or ray://host:port")
    deadline_s = monotonic_s() + CONNECT_DEADLINE_S
    while not _port_open(where):
        if monotonic_s() > deadline_s:
            raise SessionError(f"no Ray answers at {address}; `ray start --head` starts one")


def sent_checkout() -> Path | None:
    """The checkout to send to a Ray that lacks Shoal; None where it is installed, or where a job has brought it."""
    root = checkout_root()
    is_checkout = (root / "pyproject.toml").is_file() and (root / "cluster" / "cli.py").is_file()
    return root if is_checkout and not in_job() else None


def in_job() -> bool:
    """Whether this process is the entrypoint of a Ray job, which runs in the working directory it was sent with."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def stop_ray(session: Session) -> None:
    """End an own Ray and everything it started; nothing happens to somebody else's."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
    if not session.pid:
        return
    known = family(session)
    if (head := _head(session)) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            head.send_signal(signal.SIGTERM)
        psutil.wait_procs(known, timeout=STOP_DEADLINE_S)
    # What is left has outlived its parent (Serve's HAProxy reloads itself), or does not listen.
    deadline_s = monotonic_s() + STOP_DEADLINE_S
    while monotonic_s() < deadline_s:
        left = [p for p in {*known, *family(session)} if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def family(session: Session) -> list[psutil.Process]:
    """Living processes that an own Ray started: its descendants, and those whose parent has gone, by their mark.

    Ray's own processes overwrite their environment with a title, so the mark alone would miss them.
    """
    found = []
    if (head := _head(session)) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [head, *head.children(recursive=True)]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and session.mark and process.environ().get(SESSION_MARK) == session.mark:
                found.append(process)
    return found
