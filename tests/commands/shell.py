"""Verbs of the command tests: run `shoal`, write a manifest with a free port, wait, look for what was left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from shoal.cluster.live.session import SESSION_MARK, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND_S = 150.0


class Shell:
    """One user: a state folder, a data folder, and the processes started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.state = folder / "state"
        settings = {"SHOAL_STATE_DIR": str(self.state), "SHOAL_DATA_DIR": str(folder / "data"), "COLUMNS": "120"}
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

    def assert_nothing_left(self, before: set[int]) -> None:
        """No record, no process of a Ray that is not in `before`, and the API's port free."""
        assert self.sessions() == []
        wait("no process is left", lambda: not own_processes() - before, 15.0)
        assert free_again(self.port)

    def clean_up(self) -> None:
        if self.sessions():
            self.run("down")
        for process in self._begun:
            if process.poll() is None:
                process.terminate()
                process.wait(COMMAND_S)


def own_processes() -> set[int]:
    """Living processes of this test's own Rays: children (or orphans) marked in the environment or by command line."""
    found = set()
    for process in psutil.process_iter():
        try:
            marked = SESSION_MARK in process.environ() and process.environ().get("PYTEST_CURRENT_TEST")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def free_again(port: int) -> bool:
    """Whether nobody listens on the port."""
    return not [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def wait(what: str, condition: Callable[[], bool], seconds: float = COMMAND_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:.0f} s: {what}"
        time.sleep(0.1)
