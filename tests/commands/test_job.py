"""A Ray job from a checkout, on a Ray whose nodes have only the third-party packages."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from commands.shell import COMMAND_S, ROOT, Shell, free_again, wait
from shoal.cluster.live.session import free_port

DOWN_MAX_S = 25.0  # what must not come back is Serve's default drain of 35 s
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Head:
    """Somebody else's Ray, started outside the checkout and without PYTHONPATH."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.port, self.dashboard, self.agent, self.client = (free_port() for _ in range(4))
        self.address = f"127.0.0.1:{self.port}"
        path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])  # a job's `python`
        self.env = env | {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_TMPDIR": str(folder), "PATH": path}
        self.log = (folder / "head.log").open("wb")
        self.process = subprocess.Popen(
            [
                *RAY, "start", "--head", "--block", "--disable-usage-stats", f"--port={self.port}", "--num-cpus=64",
                f"--dashboard-port={self.dashboard}", f"--dashboard-agent-listen-port={self.agent}",
                f"--ray-client-server-port={self.client}", f"--object-store-memory={256 << 20}",
                "--min-worker-port=0", "--max-worker-port=0",
            ],
            cwd=folder, env=self.env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait_started(self) -> None:
        def serves_jobs() -> bool:
            assert self.process.poll() is None, (self.folder / "head.log").read_text()
            try:
                headers = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
                return httpx.get(f"http://127.0.0.1:{self.dashboard}/api/version", headers=headers).status_code == 200
            except httpx.HTTPError:
                return False

        wait("the Ray takes jobs", serves_jobs)

    def actors(self) -> str:
        """Names of all living named actors, as the Ray tells them to a fresh process outside the checkout."""
        code = (
            "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
            "print([a['name'] for a in ray.util.list_named_actors(all_namespaces=True)])"
        )
        words = [sys.executable, "-c", code, self.address]
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self) -> None:
        """End exactly this Ray."""
        started = [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]
        for pid in started:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        self.process.wait(10)
        self.log.close()


@pytest.fixture
def head(shell: Shell) -> Iterator[Head]:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="job"))  # Ray's socket names have little room for a long path
    head = Head(folder, shell.env)
    try:
        head.wait_started()
        yield head
    finally:
        head.stop()
        shutil.rmtree(folder, ignore_errors=True)


def checkout(folder: Path, manifest: Path) -> Path:
    """The repository as `git clone` would give it, with a manifest that listens on a free port."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if not name.startswith("tests/"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    shutil.copy(manifest, folder / "manifests" / "local.yaml")
    return folder


def test_a_job_deploys_a_cluster_that_outlives_it(shell: Shell, head: Head) -> None:
    here = checkout(shell.folder / "checkout", shell.manifest("local"))
    submit = [
        *RAY, "job", "submit", "--working-dir", ".", "--", "python", "-m", "shoal.cluster.up", "manifests/local.yaml",
    ]  # fmt: skip
    env = shell.env | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{head.dashboard}"}
    done = subprocess.run(submit, cwd=here, env=env, capture_output=True, text=True, timeout=2 * COMMAND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"local is ready at http://127.0.0.1:{shell.port}" in done.stdout
    assert shell.sessions() == [], "a job's machine is not its user's: nothing is recorded there"

    endpoint = f"http://127.0.0.1:{shell.port}"
    body = {"model": httpx.get(f"{endpoint}/v1/models").json()["data"][0]["id"], "max_tokens": 4, "temperature": 0}
    body["ignore_eos"] = True
    body["messages"] = [{"role": "user", "content": "hello"}]
    answer = httpx.post(f"{endpoint}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4

    looked = shell.run("status", "--address", head.address)
    assert looked.returncode == 0, looked.stderr
    assert f"local  {endpoint}  healthy" in looked.stdout
    began_s = time.monotonic()
    down = shell.run("down", "--address", head.address, "--name", "local")
    took_s = time.monotonic() - began_s
    assert (down.returncode, down.stdout) == (0, "local is down\n"), down.stderr
    assert head.actors() == "[]", "neither a member nor Serve stays"
    assert free_again(shell.port)
    assert head.process.poll() is None, "the Ray is not ours to end"
    assert took_s < DOWN_MAX_S, f"down took {took_s:.1f} s: Serve's own drain alone would be 30"
