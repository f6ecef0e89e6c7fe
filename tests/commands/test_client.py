"""What the commands' HTTP client sends besides the body, and how it gathers a streamed answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from shoal.cluster.commands.client import chat_once, key_header
from shoal.cluster.live.session import SessionError


def test_the_key_comes_from_the_environment_and_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert key_header() == {}
    monkeypatch.setenv("SHOAL_API_KEY", "sk-1")
    assert key_header() == {"authorization": "Bearer sk-1"}


def piece(arguments: str, **fields: str) -> dict:
    return {"index": 0, "function": {"arguments": arguments, **fields}}


DELTAS = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "It rains"},
    {"reasoning_content": "?"},
    {"content": "Let me "},
    {"content": "look."},
    {"tool_calls": [piece("", name="weather") | {"id": "1", "type": "function"}]},
    {"tool_calls": [piece('{"city": ')]},
    {"tool_calls": [piece('"Oslo"}')]},
]
LAST = {"choices": [], "usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 128}}}


class Streaming(BaseHTTPRequestHandler):
    """Answers every chat with the same stream."""

    events: tuple[dict, ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in self.events))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Streaming)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_text_thoughts_and_calls_are_gathered_apart(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in DELTAS]
    events[-1]["choices"][0]["finish_reason"] = "tool_calls"
    monkeypatch.setattr(Streaming, "events", (*events, LAST))
    shown: list[str] = []
    reply = chat_once(endpoint, {"model": "m", "messages": []}, "r", shown.append)
    assert (reply.reasoning, reply.text) == ("It rains?", "Let me look.")
    assert reply.calls == (("weather", '{"city": "Oslo"}'),)
    assert (reply.finish_reason, reply.cached_tokens) == ("tool_calls", 128)
    assert shown == ["It rains", "?", "Let me ", "look."]
    assert 0 < reply.ttft_s <= reply.total_s


def test_an_error_in_the_stream_is_the_users_to_read(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streaming, "events", ({"error": {"message": "the engine is gone"}},))
    with pytest.raises(SessionError, match="the engine is gone"):
        chat_once(endpoint, {"model": "m", "messages": []}, "r")
