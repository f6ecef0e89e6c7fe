"""Rules a manifest must keep that depend on the checkpoint: lengths, kept rows, pools, images."""

from collections.abc import Iterator

from shoal.cluster.errors import Problem
from shoal.cluster.facts import Facts
from shoal.cluster.manifest_types import Decode, Manifest, Normal, Prefill
from shoal.engines.core.layout import blocks_needed


def problems_with_facts(manifest: Manifest, facts: Facts) -> tuple[Problem, ...]:
    """Every rule broken by this manifest with this checkpoint."""
    found: list[Problem] = []
    asked, most = manifest.model.max_model_len, facts.model.positions_max
    if asked > most:
        rule = f"must be at most {most}, the positions of {facts.model.name}"
        found.append(Problem("model.max_model_len", asked, rule, "lower it"))
    if manifest.encoders.replicas and not facts.model.vision_bytes:
        rule = f"needs vision weights, which {facts.model.name} lacks"
        found.append(Problem("encoders.replicas", manifest.encoders.replicas, rule, "write 0"))
    for name, section in (("prefill", manifest.prefill), ("decode", manifest.decode), ("normal", manifest.normal)):
        if section is not None:
            found += _section(name, section, manifest, facts)
    return tuple(found)


def _section(name: str, section: Prefill | Decode | Normal, m: Manifest, facts: Facts) -> Iterator[Problem]:
    if not isinstance(section, Decode) and section.truncation.mode != "off" and section.truncation.keep != "auto":
        least = facts.model.window + facts.model.backtracking
        if section.truncation.keep < least:
            rule = f"must be at least {least}: window {facts.model.window} + backtracking {facts.model.backtracking}"
            yield Problem(f"{name}.truncation.keep", section.truncation.keep, rule, "write auto")
    if not isinstance(section, Prefill):
        yield from _drafts(name, section, facts)
    least = 1 + blocks_needed(m.model.max_model_len, facts.model.block_tokens)
    if section.blocks != "auto" and section.blocks < least:
        rule = f"must be at least {least} to hold one sequence of model.max_model_len = {m.model.max_model_len}"
        yield Problem(f"{name}.blocks", section.blocks, rule, "write auto, or shorten max_model_len")
    if section.slots != "auto" and section.slots < section.sequences_max + 1:
        rule = f"must be at least sequences_max + 1 = {section.sequences_max + 1}"
        yield Problem(f"{name}.slots", section.slots, rule, "write auto: slot 0 is null, each sequence has its own")


def _drafts(name: str, section: Decode | Normal, facts: Facts) -> Iterator[Problem]:
    most, drafts = facts.model.drafts_max, section.drafts
    if drafts > most:
        lacks = f"needs a drafter, which {facts.model.name} lacks"
        rule = f"must be at most {most}, the block of the drafter of {facts.model.name}" if most else lacks
        yield Problem(f"{name}.drafts", drafts, rule, f"write {most}" if most else "write 0")
    rows = section.sequences_max * (1 + drafts)
    if drafts and isinstance(section, Normal) and section.step_tokens_max < rows:
        rule = f"must be at least sequences_max * (1 + drafts) = {rows}, the rows of a decode step"
        yield Problem(f"{name}.step_tokens_max", section.step_tokens_max, rule, "raise it, or lower one of the two")
