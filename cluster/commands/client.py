"""A small HTTP client for commands: one chat, streamed or not, with its story afterwards."""

import base64
import json
import mimetypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from shoal.cluster.api.answer import merge_tool_call
from shoal.cluster.live.session import SessionError

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: text, thoughts, tool calls as (name, JSON of the arguments), the finish reason, the usage object,
    and seconds to the first token and in all."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    usage: dict[str, Any]
    ttft_s: float
    total_s: float

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came out of the store."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


@dataclass(slots=True)
class _Gathered:
    """An answer as its events come."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def is_begun(self) -> bool:
        """Whether there is anything of an answer yet."""
        return bool(self.text or self.reasoning or self.calls)

    def add(self, event: dict[str, Any]) -> str:
        """Take an event over; the text or thoughts that it adds."""
        self.usage = event.get("usage") or self.usage
        shown = ""
        for choice in event.get("choices", []):
            delta = choice["delta"]
            content, thoughts = delta.get("content") or "", delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                merge_tool_call(self.calls, piece)
            self.text += content
            self.reasoning += thoughts
            shown += thoughts + content
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return shown


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
    gathered = _Gathered()
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
                if text := gathered.add(event):
                    on_text(text)
                first_s = first_s or (monotonic_s() if gathered.is_begun else 0.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SessionError(f"{endpoint} does not answer: {error}; is the cluster up?") from error
    ended_s = monotonic_s()
    calls = tuple((call["function"]["name"], call["function"].get("arguments", "")) for call in gathered.calls)
    return Reply(
        gathered.text,
        gathered.reasoning,
        calls,
        gathered.finish_reason,
        gathered.usage,
        (first_s or ended_s) - started_s,
        ended_s - started_s,
    )


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
