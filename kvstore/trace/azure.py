"""The Azure 2023 format: a CSV of arrival time, prompt tokens and output tokens; it has no block ids.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.lines import read_lines
from shoal.kvstore.trace.packed import TraceRequest

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NO_BLOCKS = np.empty(0, np.int64)


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Requests in file order with times from the first one on; TraceError for a line that breaks a rule."""
    first: datetime | None = None
    latest_us = 0
    for number, raw in read_lines(path):
        if number == 1:
            if raw.removeprefix(b"\xef\xbb\xbf") != HEADER:
                raise TraceError(path, 1, "header", f"must be {HEADER.decode()}")
            continue
        cells = raw.decode("utf-8", "replace").split(",")
        if len(cells) != len(_COLUMNS):
            raise TraceError(path, number, "the line", f"must have {len(_COLUMNS)} cells, not {len(cells)}")
        at = _time(path, number, cells[0])
        first = first or at
        time_us = (at - first) // timedelta(microseconds=1)
        if time_us < latest_us:
            raise TraceError(path, number, "TIMESTAMP", f"= {cells[0]} must not be before the line above")
        latest_us = time_us
        tokens = [_count(path, number, name, cell) for name, cell in zip(_COLUMNS[1:], cells[1:], strict=True)]
        yield TraceRequest(time_us, tokens[0], tokens[1], _NO_BLOCKS)


def _time(path: Path, number: int, cell: str) -> datetime:
    whole, _, fraction = cell.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{(fraction or '0')[:6]:0<6}")
    except ValueError:
        raise TraceError(path, number, "TIMESTAMP", f"= {cell!r} must be a date and time") from None


def _count(path: Path, number: int, name: str, cell: str) -> int:
    if not cell.isdecimal() or len(cell) > 12:
        raise TraceError(path, number, name, f"= {cell!r} must be a whole number of tokens")
    return int(cell)
