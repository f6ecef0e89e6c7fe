"""The ServeGen rate format: a CSV of requests a second by workload and window of ten minutes.

Source: alibaba/ServeGen, summed over clients: `workload,window_start_s,requests_per_s,active_clients`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.lines import read_lines

HEADER = b"workload,window_start_s,requests_per_s,active_clients"
WINDOW_S = 600


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests a second of one workload by window of `WINDOW_S`, from time 0; a window nobody reported has none."""

    workload: str
    per_s: tuple[float, ...]


def read_servegen(path: Path) -> dict[str, Rates]:
    """Rates by workload; TraceError for a line that breaks a rule."""
    found: dict[str, dict[int, float]] = {}
    for number, raw in read_lines(path):
        if number == 1:
            if raw != HEADER:
                raise TraceError(path, 1, "header", f"must be {HEADER.decode()}")
            continue
        cells = raw.decode("utf-8", "replace").split(",")
        if len(cells) != 4:
            raise TraceError(path, number, "the line", f"must have 4 cells, not {len(cells)}")
        if not cells[1].isdecimal() or len(cells[1]) > 9 or int(cells[1]) % WINDOW_S:
            raise TraceError(path, number, "window_start_s", f"= {cells[1]!r} must be a multiple of {WINDOW_S}")
        window, windows = int(cells[1]) // WINDOW_S, found.setdefault(cells[0], {})
        if window in windows:
            raise TraceError(path, number, "window_start_s", f"= {cells[1]} stands twice for {cells[0]}")
        windows[window] = _rate(path, number, cells[2])
    return {
        name: Rates(name, tuple(windows.get(at, 0.0) for at in range(max(windows) + 1)))
        for name, windows in found.items()
    }


def _rate(path: Path, number: int, cell: str) -> float:
    try:
        rate = float(cell)
    except ValueError:
        rate = -1.0
    if not (rate >= 0 and math.isfinite(rate)):
        raise TraceError(path, number, "requests_per_s", f"= {cell!r} must be a number, 0 or more")
    return rate
