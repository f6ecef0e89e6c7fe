"""A small HTTP client for commands: one chat, streamed or not, with its story afterwards."""

import base64
import json
import mimetypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from shoal.cluster.live.session import SessionError

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: the text, the finish reason, the usage object, and seconds to the first token and in all."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    ttft_s: float
    total_s: float


def data_url(path: Path) -> str:
    """An image file as a data URL."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def message(text: str, images: list[str]) -> dict[str, Any]:
    """One user message, pictures first."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def key_header() -> dict[str, str]:
    """The API key of `$SHOAL_API_KEY` as a header, for clusters that ask for one; a key on a command line would show
    in process lists."""
    key = os.environ.get("SHOAL_API_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


def chat_once(
    endpoint: str, body: dict[str, Any], request_id: str, on_text: Callable[[str], None] = lambda text: None
) -> Reply:
    """Send one streamed chat and pass its text on as it comes. SessionError with the server's message otherwise."""
    from shoal.cluster.live.clock import monotonic_s

    started_s, first_s = monotonic_s(), 0.0
    text, reason = "", ""
    usage: dict[str, Any] = {}
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.stream(
            "POST",
            f"{endpoint}/v1/chat/completions",
            json=body,
            timeout=TIMEOUT_S,
            headers=key_header() | {"x-request-id": request_id},
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                raise SessionError(_error_text(answer.read(), answer.status_code))
            for event in _events(answer):
                if "error" in event:
                    raise SessionError(event["error"]["message"])
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    delta = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                    if delta:
                        first_s = first_s or monotonic_s()
                        on_text(delta)
                    text += delta
                    reason = choice.get("finish_reason") or reason
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SessionError(f"{endpoint} does not answer: {error}; is the cluster up?") from error
    ended_s = monotonic_s()
    return Reply(text, reason, usage, (first_s or ended_s) - started_s, ended_s - started_s)


def story(endpoint: str, request_id: str) -> dict[str, Any]:
    """The timeline of a recent request; empty marks if the entrypoint has forgotten it."""
    try:
        answer = httpx.get(f"{endpoint}/debug/requests/{request_id}", timeout=10.0, headers=key_header())
        found: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise SessionError(f"{endpoint} does not tell about {request_id}: {error}") from error
    return found if answer.status_code == httpx.codes.OK else {"marks": []}


def _events(answer: httpx.Response) -> Any:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _error_text(raw: bytes, status: int) -> str:
    try:
        return f"HTTP {status}: {json.loads(raw)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {raw[:200].decode(errors='replace')}"
