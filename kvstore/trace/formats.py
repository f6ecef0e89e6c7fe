"""Which format a trace file has, told by its first line, and the file as a packed trace."""

from enum import StrEnum
from pathlib import Path

import msgspec
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace import azure, mooncake, servegen
from shoal.kvstore.trace.lines import read_lines
from shoal.kvstore.trace.packed import Trace, pack_requests, pack_sessions
from shoal.kvstore.trace.weka import read_weka

# Session starts of a Weka file are unknown; one start every 300 s is the golden file's choice, and so ours.
START_STEP_US = 300_000_000
GRAIN_TOKENS = 128


class Format(StrEnum):
    """Formats that are read."""

    MOONCAKE = "mooncake"
    WEKA = "weka"
    AZURE = "azure"
    SERVEGEN = "servegen"


def sniff(path: Path) -> Format:
    """The format of a trace file; TraceError if its first line is of none."""
    first = next(iter(read_lines(path)), None)
    if first is None:
        raise TraceError(path, 1, "file", "must not be empty")
    line = first[1].removeprefix(b"\xef\xbb\xbf")
    if line == azure.HEADER:
        return Format.AZURE
    if line == servegen.HEADER:
        return Format.SERVEGEN
    try:
        keys = set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        keys = set()
    if "hash_ids" in keys:
        return Format.MOONCAKE
    if "requests" in keys:
        return Format.WEKA
    known = "must be a Mooncake or Weka JSON object, or the header of an Azure or ServeGen table"
    raise TraceError(path, first[0], "the line", known)


def load_trace(
    path: Path, block_tokens: int | None = None, start_step_us: int = START_STEP_US, by_model: bool = False
) -> Trace:
    """The requests of a file as arrays; TraceError for a bad line, and for a file of rates, which has no requests.

    `block_tokens`: tokens of an id of a Mooncake file (512 unless given), or the grain of a Weka file (128 unless
    given). `start_step_us`: between starts of Weka sessions, unless the file says when each starts. `by_model`: the
    model is part of a grain's name.
    """
    kind, name = sniff(path), path.name
    if kind is Format.MOONCAKE:
        block = block_tokens or mooncake.BLOCK_TOKENS
        return pack_requests(name, block, mooncake.read_mooncake(path, block))
    if kind is Format.AZURE:
        return pack_requests(name, block_tokens or GRAIN_TOKENS, azure.read_azure(path))
    if kind is Format.SERVEGEN:
        raise TraceError(path, 1, "file", "has rates, not requests; place sessions by it with `shoal trace compose`")
    grain = block_tokens or GRAIN_TOKENS
    sessions = list(read_weka(path, grain))
    given = [s.start_us for s in sessions if s.start_us is not None]
    if given and len(given) != len(sessions):
        raise TraceError(path, 1, "start", "must be given for every session or for none")
    starts: list[int] | int = given or start_step_us
    is_composed = any(s.is_composed for s in sessions)
    return pack_sessions(name, grain, (s.requests for s in sessions), starts, by_model, is_composed)
