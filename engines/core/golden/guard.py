"""Replays regions in which threads forbid or allow the host to wait for the device."""

from typing import Any

from shoal.engines.core.golden.outcome import differences
from shoal.engines.core.sync_intents import Intent, SyncIntents, SyncMode


def replay_guard(entry: dict[str, Any]) -> list[str]:
    """Enter and leave as the scenario says and compare the process-wide mode after each operation."""
    intents = SyncIntents()
    mode = SyncMode(entry["baseline"])
    found: list[str] = []
    for index, operation in enumerate(entry["ops"]):
        thread = operation["thread"]
        if "enter" in operation:
            mode = intents.enter(thread, Intent(operation["enter"]), found=mode)
        else:
            mode = intents.leave(thread)
        found += differences(operation["mode"], mode.value, f"op {index}.mode")
    return found
