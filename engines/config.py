"""What a manifest asks of an engine, as frozen values; what was measured is a separate type."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a group of ranks does. NORMAL prefills and decodes in one engine."""

    ENCODER = "encoder"
    PROMPT = "prompt"
    COMPLETION = "completion"
    NORMAL = "normal"


class TruncationMode(StrEnum):
    """How prefill treats the decoder layers (YOCO truncation, engine-side name of bounded SWA replay)."""

    OFF = "off"
    MASK = "mask"
    COMPACT = "compact"


class VerifyMode(StrEnum):
    """FULL verifies every draft held; VARLEN as many as pay, by the step curve."""

    FULL = "full"
    VARLEN = "varlen"


class Determinism(StrEnum):
    """What an answer may depend on besides its request and the model.

    BATCH_INVARIANT: greedy answers on nothing else, whatever the batch, the chunks, hits, hand-offs and drafts; sampled
    ones on nothing else where no drafts are made. FULL: sampled ones with drafts neither. Each row then draws the token
    that an engine without drafts would draw, and a draft counts only if it is that one, so fewer are accepted.
    OFF promises nothing; on a CPU it computes as BATCH_INVARIANT.
    """

    OFF = "off"
    BATCH_INVARIANT = "batch_invariant"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Truncation:
    """Only the last `keep` prompt tokens run through the decoder layers; `keep` >= window + backtracking."""

    mode: TruncationMode = TruncationMode.OFF
    keep: int = 140


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much paged and per-sequence memory an engine asks for; id 0 of both pools is null."""

    block_tokens: int = 128
    blocks_count: int = 256
    slots_count: int = 20


STEP_TIME_OFF = 0
STEP_TIME_AUTO = -1
"""As long as `step_tokens_max` rows take that attend to nothing cached: known once steps were measured."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one rank's scheduler and runner need to know, resolved: no field is optional or automatic.

    `drafts` are made for each sequence in each decode step, 0 = none, and verified as `verify` says; a PROMPT engine
    makes none, it keeps the drafter's window entries for the engine that does.
    A prefill step has at most `step_tokens_max` rows, and fewer where they would take longer than `step_time_us`
    (or STEP_TIME_OFF, STEP_TIME_AUTO). `waiting_max` prompts may wait, one more is rejected; 0 = no bound.
    """

    role: Role
    max_model_len: int = 4096
    step_tokens_max: int = 2048
    step_time_us: int = STEP_TIME_OFF
    sequences_max: int = 16
    recompute_preempted: bool = True
    watermark: float = 0.9
    truncation: Truncation = Truncation()
    cache: CacheConfig = CacheConfig()
    drafts: int = 0
    verify: VerifyMode = VerifyMode.FULL
    waiting_max: int = 0
    determinism: Determinism = Determinism.BATCH_INVARIANT
