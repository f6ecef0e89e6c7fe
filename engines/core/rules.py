"""How the scheduler decides where the engine's configuration leaves a choice; defaults are what we want."""

from dataclasses import dataclass

from shoal.engines.config import EngineConfig

SUM_K_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class SchedulingRules:
    """Constants and switches of the step scheduler.

    `all_interval`, `any_interval`: at every multiple of the first, decode gives way to prefill if all ranks want it,
    of the second if any does (engine runtime notes 2). `chunk_alignment`: rows of a chunk are charged in multiples of
    this (2 * context-parallel ranks). `lookahead_tokens`: no chunk is shorter. `drafts` are made for
    every sequence in every decode step and verified in the next; `pad_token_id` stands in where none were made, and
    is any id of the vocabulary. `sum_k_max` bounds the keys of a prefill step. The switches below exist because
    the published engine, whose traces are our fixtures, does the opposite; the defaults are what we want.

    `vote_when_idle`: while no rank of the group runs anything, vote on every step. `purge_before_vote`: a dead
    request is no work. `younger_may_pass`: a request that cannot run yet does not hold up those behind it.
    `charge_whole_prompt`: charge a chunk's whole prompt against `sum_k_max` instead of the keys it attends.
    `refuse_at_submit`: say at once that a request can never be served. `preempt_on_need`: a decode sequence that
    needs no block preempts nobody. `count_handoffs`: a prompt waiting for its hand-off counts as running.
    `waiting_max` requests may wait, one more is rejected; 0 = no bound. `overtaken_max`: so often may younger prompts
    be given memory before one that waits for room or for its turn; after that nobody new passes it.
    `adopt_when_sole`: a branch that alone owns a slot or block keeps it instead of copying it.

    `pipelined`: a decode step may be planned while the one before it is open (zero-overhead scheduling, notes 6).
    """

    all_interval: int = 70
    any_interval: int = 100
    chunked_prefill: bool = True
    chunk_alignment: int = 1
    lookahead_tokens: int = 0
    drafts: int = 0
    pad_token_id: int = 0
    sum_k_max: int = SUM_K_UNLIMITED
    vote_when_idle: bool = True
    purge_before_vote: bool = True
    younger_may_pass: bool = True
    charge_whole_prompt: bool = False
    refuse_at_submit: bool = True
    preempt_on_need: bool = True
    count_handoffs: bool = False
    waiting_max: int = 0
    overtaken_max: int = 64
    adopt_when_sole: bool = True
    pipelined: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and the rule."""
        for name in ("all_interval", "any_interval", "chunk_alignment", "sum_k_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("lookahead_tokens", "drafts", "pad_token_id", "waiting_max", "overtaken_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")


def prompt_limit(config: EngineConfig, rules: SchedulingRules) -> int:
    """The longest prompt this engine computes (notes 3): one step must hold it unless prompts are cut."""
    if rules.chunked_prefill:
        return config.max_model_len
    return min(config.max_model_len, step_room(config, rules))


def step_room(config: EngineConfig, rules: SchedulingRules) -> int:
    """Rows an empty prefill step takes from one prompt: the token budget rounded down to the chunk alignment."""
    return config.step_tokens_max // rules.chunk_alignment * rules.chunk_alignment


def check_settings(config: EngineConfig, rules: SchedulingRules) -> None:
    """Raise ValueError if no sequence could ever be scheduled, or some could be stuck (notes 3, start-up checks)."""
    rows = config.sequences_max * (1 + rules.drafts)
    if config.step_tokens_max < rows:
        raise ValueError(
            f"step_tokens_max = {config.step_tokens_max} must be at least sequences_max * (1 + drafts) = {rows}: "
            "a decode step computes that many rows"
        )
    if rules.drafts >= config.cache.block_tokens:
        raise ValueError(
            f"drafts = {rules.drafts} must be less than block_tokens = {config.cache.block_tokens}: "
            "a decode step takes at most one block a sequence"
        )
    if step_room(config, rules) < 1:
        raise ValueError(
            f"step_tokens_max = {config.step_tokens_max} must be at least chunk_alignment = {rules.chunk_alignment}"
        )
    if rules.sum_k_max < prompt_limit(config, rules):
        raise ValueError(
            f"sum_k_max = {rules.sum_k_max} must be at least the longest prompt, {prompt_limit(config, rules)}: "
            "lower max_model_len or raise it"
        )
    if config.sequences_max < 1:
        raise ValueError(f"sequences_max = {config.sequences_max} must be at least 1")
    if not 0 < config.watermark <= 1:
        raise ValueError(f"watermark = {config.watermark} must lie in (0, 1]: a share of the blocks")
