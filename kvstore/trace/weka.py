"""The Weka format: one agent session a JSON line, blocks as runs of ids local to the session, sub-agents nested.

Source: callanjfox/kv-cache-tester, real coding-agent sessions, with `hash_ids` rewritten as runs. Times are seconds
from the session's start; ids stand for full 64-token blocks and name their whole prefix. Session starts are unknown:
whoever replays chooses them, unless the line has `start`, which only composed traces do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.lines import decode_line, read_lines
from shoal.kvstore.trace.packed import TraceRequest

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=2**31)]
_SUBAGENT = "subagent"


class _Entry(msgspec.Struct, rename={"input_tokens": "in", "output_tokens": "out", "kind": "type"}):
    """A model call, or a sub-agent with calls of its own."""

    t: _Seconds
    kind: str = "s"
    model: str = ""
    input_tokens: _Count = 0
    output_tokens: _Count = 0
    hash_runs: list[tuple[_Count, _Count]] = []
    requests: list["_Entry"] = []


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    requests: list[_Entry]
    start: _Seconds | None = None
    composed: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class WekaSession:
    """One session: requests with times from its start, in file order, at the grain asked for."""

    name: str
    start_us: int | None
    is_composed: bool
    requests: tuple[TraceRequest, ...]


def read_weka(path: Path, grain_tokens: int = 128) -> Iterator[WekaSession]:
    """Sessions in file order, one in memory at a time; TraceError for a line that breaks a rule.

    `grain_tokens` must be a multiple of the block: of each grain the last block's id is kept, which names all before.
    """
    decoder = msgspec.json.Decoder(_Session)
    for number, raw in read_lines(path):
        line = decode_line(decoder, path, number, raw)
        if grain_tokens % line.block_size:
            rule = f"= {line.block_size} must divide the grain of {grain_tokens} tokens"
            raise TraceError(path, number, "block_size", rule)
        step = grain_tokens // line.block_size
        requests = tuple(
            _request(path, number, place, entry, offset, step, line.block_size)
            for place, entry, offset in _calls(line.requests)
        )
        start_us = None if line.start is None else round(line.start * 1_000_000)
        yield WekaSession(line.id, start_us, bytes(line.composed) != b"null", requests)


def _calls(entries: list[_Entry]) -> Iterator[tuple[str, _Entry, float]]:
    """(place in the line, call, seconds to add to its time), sub-agents in place of their entry."""
    for index, entry in enumerate(entries):
        if entry.kind != _SUBAGENT:
            yield f"requests[{index}]", entry, 0.0
            continue
        for inner, call in enumerate(entry.requests):
            yield f"requests[{index}].requests[{inner}]", call, entry.t


def _request(path: Path, number: int, place: str, entry: _Entry, offset: float, step: int, block: int) -> TraceRequest:
    count = sum(run for _, run in entry.hash_runs)
    if count != entry.input_tokens // block:
        rule = (
            f"stand for {count} blocks; in = {entry.input_tokens} tokens make {entry.input_tokens // block} of {block}"
        )
        raise TraceError(path, number, f"{place}.hash_runs", rule)
    ids = _expand(entry.hash_runs)[step - 1 :: step]
    time_us = round((entry.t + offset) * 1_000_000)
    return TraceRequest(time_us, entry.input_tokens, entry.output_tokens, ids, entry.model)


def _expand(runs: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in runs]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)
