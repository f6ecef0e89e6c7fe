"""A cluster whose groups have two ranks: one rank's answers, and a killed rank costs its group and no answer."""

import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
from commands.shell import Shell, wait
from shoal.cluster.live.offline import generate_text

QUESTIONS = ("Tell me about number 3.", "What is the opposite of rich?")


def ask(shell: Shell, text: str, on_words: Callable[[], None] = lambda: None, **fields: Any) -> str:
    body = {
        "model": "shoal-toy", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 28,
        "stream": True,
    } | fields  # fmt: skip
    answer = ""
    with httpx.stream("POST", f"http://127.0.0.1:{shell.port}/v1/chat/completions", json=body, timeout=90) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                answer += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if len(answer) > 8:
                    on_words()
    return answer


def members(shell: Shell) -> dict[str, dict[str, Any]]:
    done = shell.run("status", "--json")
    return {m["name"]: m for m in json.loads(done.stdout)["members"]}


def test_ranks_share_out_experts_and_a_killed_one_is_replaced_with_its_group(shell: Shell) -> None:
    done = shell.run("up", shell.manifest("groups"), "--detach")
    assert done.returncode == 0, done.stderr
    for text in QUESTIONS:
        assert ask(shell, text) == "".join(generate_text("builtin:toy", text, 28, temperature=0.0, seed=1))
    calm = [ask(shell, text, ignore_eos=True) for text in QUESTIONS]
    before, killed = members(shell), threading.Event()
    assert {name for name in before if name.startswith(("prefill/", "decode/"))} == {
        "prefill/0", "prefill/1", "decode/0", "decode/1",
    }  # fmt: skip
    disturbed = ["", ""]

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            os.kill(before["decode/1"]["pid"], signal.SIGKILL)

    def run(index: int) -> None:
        disturbed[index] = ask(shell, QUESTIONS[index], kill, ignore_eos=True)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert killed.is_set()
    assert disturbed == calm
    wait("all are ready", lambda: all(m["state"] == "ready" for m in members(shell).values()))
    after = members(shell)
    assert after["decode/0"]["epoch"] == after["decode/1"]["epoch"] > before["decode/0"]["epoch"]
    assert after["decode/0"]["pid"] != before["decode/0"]["pid"]
    assert after["prefill/0"]["pid"] == before["prefill/0"]["pid"]
    assert shell.run("down").returncode == 0
