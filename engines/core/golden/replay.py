"""Replays every entry of a fixture file and says what came of each."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from shoal.engines.core.golden.arithmetic import ENTRY_REPLAYS, ROW_REPLAYS, replay_rows
from shoal.engines.core.golden.group import replay_vote, replay_vote_table
from shoal.engines.core.golden.guard import replay_guard
from shoal.engines.core.golden.lengths import replay_verify
from shoal.engines.core.golden.matcher import replay_matcher
from shoal.engines.core.golden.outcome import MalformedError, NotYetError, Outcome, Verdict
from shoal.engines.core.golden.trace import TraceReplay
from shoal.engines.core.golden.wanted import WANTED

FORMAT = 1


def replay_file(path: Path) -> Iterator[Verdict]:
    """The verdict on each entry of a file, in file order. Raises MalformedError for a file of another schema."""
    document = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise MalformedError(f"{path}: expected a map with format: {FORMAT}")
    known = [name for name in ("scenarios", "host", "estimators", "device") if name in document]
    if not known:
        raise MalformedError(f"{path}: has none of the sections scenarios, host, estimators, device")
    for section in known:
        for entry in document[section]:
            if section == "scenarios":
                yield replay_entry(entry, document.get("trace_defaults", {}))
            else:
                yield replay_verify(section, entry)


def replay_entry(entry: dict[str, Any], defaults: dict[str, Any]) -> Verdict:
    """Replay one scenario; one marked `defect` must come out as its text wants, under the rules we want."""
    kind, entry_id = entry["kind"], entry["id"]
    is_defect = "defect" in entry
    try:
        if is_defect:
            _require_supported(kind, entry, defaults)
            if entry_id not in WANTED:
                raise NotYetError("the wanted outcome of this defect is not written out")
            entry = {**entry, **WANTED[entry_id]}
        found = _replay(kind, entry, defaults, as_published=not is_defect)
    except NotYetError as reason:
        return Verdict(kind, entry_id, Outcome.NOT_YET, (str(reason),))
    except (KeyError, TypeError, MalformedError, AssertionError, ValueError) as error:
        return Verdict(kind, entry_id, Outcome.FAILED, (f"{type(error).__name__}: {error}",))
    return Verdict(kind, entry_id, Outcome.FAILED if found else Outcome.PASSED, tuple(found))


def _require_supported(kind: str, entry: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise NotYetError naming the missing behaviour rather than the missing expectation."""
    if kind == "trace":
        replay = TraceReplay({**defaults, **entry.get("config", {})}, as_published=False)
        for operation in entry["ops"]:
            name = next(iter(operation))
            if name not in ("step", "fork") and not hasattr(replay, f"_op_{name}"):
                raise NotYetError(f"operation {name}")


def _replay(kind: str, entry: dict[str, Any], defaults: dict[str, Any], as_published: bool) -> list[str]:
    if kind == "trace":
        return TraceReplay({**defaults, **entry.get("config", {})}, as_published).run(entry["ops"])
    if kind == "vote":
        return replay_vote(entry, defaults, as_published)
    if kind == "vote_table":
        return replay_vote_table(entry, defaults)
    if kind == "so_matcher":
        return replay_matcher(entry)
    if kind == "sync_guard":
        return replay_guard(entry)
    if kind in ROW_REPLAYS:
        return replay_rows(entry)
    if kind in ENTRY_REPLAYS:
        return ENTRY_REPLAYS[kind](entry)
    if kind == "rng_positions":
        # The prompt's position and the drafts' are ours; that of a decode row is not, and shall not be: an accepted
        # token's word would then depend on how many drafts were accepted before it in its step.
        raise NotYetError("words of decode rows by their place in the step; ours belong to absolute positions")
    raise NotYetError("kind")
