"""The Mooncake format: one request a JSON line, `hash_ids` one id a block, each naming its whole prefix.

Source: kvcache-ai/Mooncake, FAST25-release. `timestamp` in milliseconds, blocks of 512 tokens; the last id may stand
for a partial block, so there are ceil(input_length / block) of them; a line with full blocks only is taken too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.lines import decode_line, read_lines
from shoal.kvstore.trace.packed import TraceRequest

BLOCK_TOKENS = 512
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=2**40)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]


def read_mooncake(path: Path, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Requests in file order, one line in memory at a time; TraceError for a line that breaks a rule."""
    decoder = msgspec.json.Decoder(_Line)
    latest = 0.0
    for number, raw in read_lines(path):
        line = decode_line(decoder, path, number, raw)
        if line.timestamp < latest:
            raise TraceError(path, number, "timestamp", f"= {line.timestamp:g} must not be before {latest:g}")
        latest = line.timestamp
        full, partial = divmod(line.input_length, block_tokens)
        if len(line.hash_ids) not in (full, full + (partial > 0)):
            rule = f"has {len(line.hash_ids)} ids; {line.input_length} tokens make {full} full blocks of {block_tokens}"
            raise TraceError(path, number, "hash_ids", rule)
        ids = np.array(line.hash_ids, np.int64)
        if len(set(line.hash_ids)) != len(ids):
            raise TraceError(path, number, "hash_ids", "must not repeat an id: an id names its whole prefix")
        yield TraceRequest(round(line.timestamp * 1000), line.input_length, line.output_length, ids)
