"""The story of one request in a few lines a person can read, from its timeline's marks."""

from typing import Any

Marks = list[dict[str, Any]]


def story_lines(timeline: dict[str, Any]) -> list[str]:
    """One line for each stage: match, encode, route, prefill, hand-off, decode, store. Empty for no marks."""
    marks: Marks = timeline.get("marks", [])
    if not marks:
        return ["  (the entrypoint has no timeline of this request)"]
    start_us = marks[0]["at_us"]
    lines = [_line(mark, start_us) for mark in marks if mark["what"] in _TOLD]
    return [*lines, *_totals(marks)]


def _line(mark: dict[str, Any], start_us: int) -> str:
    what, told = _TOLD[mark["what"]]
    return f"  {(mark['at_us'] - start_us) / 1000:9.1f} ms  {what:<14} {told(mark)}"


def _totals(marks: Marks) -> list[str]:
    by = {name: [m for m in marks if m["what"] == name] for name in ("first token", "ended", "saved", "chunk")}
    lines = []
    if by["first token"] and by["ended"]:
        ended, first = by["ended"][-1], by["first token"][0]
        tokens = ended.get("output_tokens", 0)
        decode_s = (ended["at_us"] - first["at_us"]) / 1e6
        rate = (tokens - 1) / decode_s if decode_s > 0 and tokens > 1 else 0.0
        lines.append(f"  {'':9}     decode         {tokens} tokens, {rate:.1f} a second after the first")
    grains, anchors = (sum(m.get(k, 0) for m in by["saved"]) for k in ("grains", "anchors"))
    if grains or anchors:
        lines.append(f"  {'':9}     saved          {grains} grains and {anchors} anchors are in the store")
    return lines


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


_TOLD: dict[str, tuple[str, Any]] = {
    "arrived": ("arrived", lambda m: f"{m['tokens']} prompt tokens, {m['images']} image(s)"),
    "matched": ("match", lambda m: f"{m['matched']} tokens are stored, {m['hit']} can be used"),
    "encoded": ("encode", lambda m: f"image {m['image']} at {m['group']}"),
    "reserved": ("reserve", lambda m: f"blocks and a slot at {m['group']}"),
    "submitted": ("prefill", lambda m: f"{m['tokens'] - m['hit']} tokens to compute at {m['group']}"),
    "prefill started": (
        "fetch",
        lambda m: (
            f"{m['hit_tokens']} tokens, {_mib(m['bytes'])} from the store, {_mib(m['memory_bytes'])} of it in memory, "
            f"in {m['fetch_us'] / 1000:.1f} ms"
            if m["hit_tokens"]
            else "nothing to fetch"
        ),
    ),
    "chunk": ("chunk", lambda m: f"{m['tokens']} tokens, {m['cached']} cached"),
    "first token": ("first token", lambda m: ""),
    "admitted": (
        "hand-off",
        lambda m: f"{_mib(m['bytes'])} to {m['group']}, admitted {m['handoff_us'] / 1000:.1f} ms after the prompt",
    ),
    "re-routed": ("re-routed", lambda m: f"{m['reason']}; {m['output_tokens']} tokens kept"),
    "waiting": ("waiting", lambda m: str(m.get("code", ""))),
    "ended": ("ended", lambda m: f"{m['reason']}, {m['output_tokens']} output tokens"),
}
