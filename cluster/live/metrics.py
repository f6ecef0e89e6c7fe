"""Counters of engines as Prometheus text, under vLLM's names where the meaning is the same."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

ASK_S = 2.0  # an engine that is slower is left out of this answer: counters go on, so the next one makes up for it

# Counter of `EngineParts.counters` -> family and help. Draft tokens are those verified: made and not looked at is ours.
FAMILIES = {
    "drafts_sequences": ("vllm:spec_decode_num_drafts", "Times that drafts of a sequence were verified."),
    "drafts_verified": ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified."),
    "drafts_accepted": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "drafts_made": ("shoal:spec_decode_num_made_tokens", "Draft tokens made, verified or not."),
}
AT = "drafts_accepted_"
AT_FAMILY = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in their block.")
JUDGED = "drafts_verified_"
JUDGED_FAMILY = (
    "shoal:spec_decode_num_judged_tokens_per_pos", "Draft tokens verified behind accepted ones only, by place."
)  # fmt: skip


async def ask_counters(engines: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    """Counters of each engine, by member name; `engines` are handles. One that does not answer is left out."""

    async def ask(handle: Any) -> Mapping[str, int] | None:
        try:
            found: Mapping[str, int] = await asyncio.wait_for(handle.counters.remote(), timeout=ASK_S)
        except (RayError, TimeoutError):
            return None
        return found

    answers = await asyncio.gather(*map(ask, engines.values()))
    return {name: counts for name, counts in zip(engines, answers, strict=True) if counts is not None}


def counters_text(model: str, engines: Mapping[str, Mapping[str, int]]) -> str:
    """One series an engine and counter; a counter without a name of its own is `shoal:<name>_total`."""
    families: dict[tuple[str, str], list[str]] = {}
    for engine, counts in sorted(engines.items()):
        for name, count in sorted(counts.items()):
            (family, text), place = family_of(name)
            position = "" if place is None else f',position="{place}"'
            line = f'{family}_total{{model_name="{model}",engine="{engine}"{position}}} {count}'
            families.setdefault((family, text), []).append(line)
    lines = []
    for (family, text), samples in sorted(families.items()):
        lines += [f"# HELP {family}_total {text}", f"# TYPE {family}_total counter", *samples]
    return "".join(f"{line}\n" for line in lines)


def family_of(name: str) -> tuple[tuple[str, str], int | None]:
    """Family and help of a counter, and the place in a block that its name ends with."""
    for prefix, family in ((AT, AT_FAMILY), (JUDGED, JUDGED_FAMILY)):
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            return family, int(name.removeprefix(prefix))
    return FAMILIES.get(name, (f"shoal:{name}", f"{name.replace('_', ' ').capitalize()}.")), None
