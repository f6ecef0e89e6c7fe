"""What resolving knows besides the manifest: plain values about the checkpoint and the machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolving needs to know of a checkpoint, read from its own configuration (bytes are exact).

    `weights_bytes` of the language model as loaded, `vision_bytes` of encoder and aligner (0: the model is blind).
    `drafts_max`: the block of its drafter (0: it has none).
    """

    name: str
    positions_max: int
    window: int
    backtracking: int
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    stored_bytes: int
    hidden: int
    weights_bytes: int
    vision_bytes: int
    vocabulary: int = 0
    drafts_max: int = 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What one node offers."""

    memory_bytes: int
    disk_free_bytes: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything resolve() knows besides the manifest."""

    model: ModelFacts
    machine: MachineFacts
