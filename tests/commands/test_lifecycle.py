"""A cluster from the command line: up, asked, looked at, down; and nothing of it stays."""

import json
import os
import pty
import signal
import subprocess
import threading

from commands.shell import Shell, wait

PROMPT = "Shoal serves a model from a cluster of roles, and a store keeps what was read. " * 8


def test_the_small_cluster_from_up_to_down(shell: Shell) -> None:
    """One engine does it all: no PROMPT or COMPLETION group, no hand-off in a request's story."""
    up = shell.run("up", shell.manifest("normal"), "--detach")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith(f"normal is ready at http://127.0.0.1:{shell.port} ")
    assert shell.sessions() == ["normal.json"]
    assert (shell.state / "normal.json").stat().st_mode & 0o077 == 0, "the record holds a token"

    looked = json.loads(shell.run("status", "--json").stdout)
    roles = sorted(member["name"].rpartition("/")[0] for member in looked["members"])
    assert roles == ["encode-balancer", "encoder", "normal", "prefill-balancer"]
    assert (looked["healthy"], looked["http"]) == (True, f"http://127.0.0.1:{shell.port}")

    asked = ("--max-tokens", "6", "--temperature", "0")
    told = shell.run("chat", PROMPT, "--explain", *asked)
    assert told.returncode == 0, told.stderr
    assert "tokens to compute at normal/0" in told.stdout
    assert "hand-off" not in told.stdout
    again = shell.run("chat", PROMPT, "--json", *asked)
    reply = json.loads(again.stdout)
    assert reply["text"]
    assert told.stdout.startswith(reply["text"]), "greedy answers are alike, streamed or not"
    assert 0 < reply["usage"]["completion_tokens"] <= 6

    refused = shell.run("up", shell.manifest("normal"))
    assert (refused.returncode, "is up already" in refused.stderr) == (1, True)
    known = shell.processes()
    down = shell.run("down")
    assert (down.returncode, down.stdout) == (0, "normal is down\n")
    shell.assert_nothing_left(known)


def test_ctrl_c_ends_a_foreground_cluster(shell: Shell) -> None:
    """On a terminal: one line that moves, then the address, until Ctrl-C."""
    master, slave = pty.openpty()
    process = shell.begin("up", shell.manifest("local"), stdout=slave, stderr=slave)
    os.close(slave)
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(master, 65536))
            except OSError:
                return  # the other end is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait("the cluster is ready", lambda: b"local is ready at" in shown or process.poll() is not None)
    assert process.poll() is None, shown.decode(errors="replace")
    assert b"starting local" in shown
    known = shell.processes()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    reader.join(5)
    assert b"local is down" in shown
    assert b"Traceback" not in shown
    os.close(master)
    shell.assert_nothing_left(known)


def test_sigterm_ends_a_cluster_that_is_starting(shell: Shell) -> None:
    process = shell.begin("up", shell.manifest("normal"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait("its Ray runs and is recorded", lambda: "normal.json" in shell.sessions())
    known = shell.processes()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert out == b""
    assert err.endswith(b"shoal: interrupted\n"), err
    shell.assert_nothing_left(known)


def test_the_demo_is_right_in_all_it_shows(shell: Shell) -> None:
    """A code out of a long text, cold, stored and with two devices gone; and one question of every other task."""
    done = shell.run("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓ right") == 9
    assert "three equal answers; cached prompt tokens: 0, 256, 256\n9 of 9 answers are right\n" in done.stdout
    assert "encode         image 0 at encoder/0" in done.stdout
    assert "hand-off" in done.stdout
    assert shell.sessions() == []
    wait("no process is left", lambda: not shell.processes(), 15.0)
