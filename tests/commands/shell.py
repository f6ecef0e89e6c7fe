"""Verbs of the command tests: run `shoal`, write a manifest with a free port, wait, look for what was left behind."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from shoal.cluster.live.session import Session, family, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "SHOAL_TEST_SHELL"
COMMAND_S = 150.0


class Shell:
    """One user: a state folder, a data folder, and the processes started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.state = folder / "state"
        settings = {
            "SHOAL_STATE_DIR": str(self.state),
            "SHOAL_DATA_DIR": str(folder / "data"),
            "COLUMNS": "120",
            MARK: uuid.uuid4().hex,
        }
        self.env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")} | settings
        self._begun: list[subprocess.Popen[bytes]] = []

    def manifest(self, name: str) -> Path:
        """A copy of a shipped manifest that listens on a free port."""
        text = (ROOT / "manifests" / f"{name}.yaml").read_text()
        assert "127.0.0.1:8000" in text
        path = self.folder / f"{name}.yaml"
        path.write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}"))
        return path

    def run(self, *words: str | Path, seconds: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """`python -m shoal WORDS…` in the checkout, to its end."""
        command = [sys.executable, "-m", "shoal", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=seconds)

    def begin(self, *words: str | Path, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        """`python -m shoal WORDS…`, left running."""
        command = [sys.executable, "-m", "shoal", *map(str, words)]
        process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=stdout, stderr=stderr)
        self._begun.append(process)
        return process

    def sessions(self) -> list[str]:
        """Names of the session records."""
        return sorted(path.name for path in self.state.glob("*")) if self.state.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Living processes of this user's recorded clusters and of their Rays, and whatever carries our mark."""
        records = [msgspec.json.decode(path.read_bytes(), type=Session) for path in self.state.glob("*.json")]
        found = [process for record in records for process in family(record)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.env[MARK]:
                    found.append(process)
        return [process for process in found if is_alive(process)]

    def assert_nothing_left(self, known: list[psutil.Process]) -> None:
        """No record, no process of ours nor any that was `known` while the cluster ran, and the API's port free."""
        assert known
        assert self.sessions() == []
        wait("no process is left", lambda: not self.processes() and not any(map(is_alive, known)), 15.0)
        assert free_again(self.port)

    def clean_up(self) -> None:
        if self.sessions():
            self.run("down")
        for process in self._begun:
            if process.poll() is None:
                process.terminate()
                process.wait(COMMAND_S)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_again(port: int) -> bool:
    """Whether nobody listens on the port."""
    return not [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def wait(what: str, condition: Callable[[], bool], seconds: float = COMMAND_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:.0f} s: {what}"
        time.sleep(0.1)
