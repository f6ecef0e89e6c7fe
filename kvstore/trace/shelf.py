"""A packed trace as files of a folder, so that many processes replay one copy in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from shoal.kvstore.trace.packed import Trace

_ARRAYS = ("times_us", "input_tokens", "output_tokens", "starts", "grains", "sessions")


def shelve(trace: Trace, folder: Path) -> None:
    """Write the trace into an existing empty folder."""
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(trace, name))
    facts = {"name": trace.name, "block_tokens": trace.block_tokens, "grains_max": trace.grains_max}
    (folder / "facts.json").write_text(json.dumps(facts | {"is_composed": trace.is_composed}), encoding="utf-8")


def take_down(folder: Path) -> Trace:
    """The trace that `shelve` wrote; its arrays are mapped, read-only, and shared between processes."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    facts |= {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
    return Trace(**facts)
