"""Build what a role needs from a checkpoint directory: an engine, or the vision tower alone."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from shoal.engines.config import Determinism, EngineConfig, Role, VerifyMode
from shoal.engines.core.layout import BlockLayout, SlotLayout, block_layout, slot_layout
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.grammar.compiler import GrammarCompiler
from shoal.engines.grammar.token_bytes import TokenBytes
from shoal.engines.model.cache import Caches
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.decoder import Model
from shoal.engines.model.numerics import Mode
from shoal.engines.run.bound import BoundModel
from shoal.engines.run.constraints import Constraints
from shoal.engines.run.curve_start import KeptCurves, starting_curve, step_clock
from shoal.engines.run.draft_pool import DraftPool
from shoal.engines.run.drafting import Drafting, Limits
from shoal.engines.run.engine import Engine
from shoal.engines.run.followers import Follower, Followers, LeadingMemory, LeadingModel
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.rank_group import Collectives
from shoal.engines.run.runner import Runner

logger = logging.getLogger(__name__)


def load_model(directory: Path, mode: Mode = Mode.N1, with_drafter: bool = False) -> Model:
    """The language model of a checkpoint, without vision; raises ConfigError, WeightsError.

    Engines with drafts, and those that prefill for them, need the drafter; `build_engine` says so if it is missing.
    """
    model = Model.load(directory, mode, with_drafter)
    logger.info("loaded %s in mode %s; ops: %s", directory, mode, implementations(model))
    return model


def implementations(model: Model) -> Mapping[str, str]:
    """Which implementation each operator of this process uses; there is one so far, the torch reference."""
    torch_version = f"torch {torch.__version__} {str(model.numerics.wide).removeprefix('torch.')}"
    operators = ("linear", "attention", "indexer", "compressor", "experts", "mhc", "engram", "norm", "rope", "quant")
    return {**dict.fromkeys(operators, torch_version), "sampler": "torch float64, splitmix64"}


def build_engine(
    model: Model,
    config: EngineConfig,
    saves_grains: bool = False,
    rules: SchedulingRules | None = None,
    curves: KeptCurves | None = None,
    followers: Followers | None = None,
) -> tuple[Engine, DeviceMemory]:
    """An engine of one rank over a loaded model, and the memory a transfer library registers.

    With `followers`, each of which runs what `build_follower` gives it, all ranks compute a part of every prompt.

    Several engines may share one model: it is never written. An engine that chooses how many drafts it verifies times
    its steps first, unless `curves` has a curve of them. Raises ValueError for settings that contradict the model or
    each other.
    """
    check_truncation(model, config)
    check_drafts(model, config)
    if followers is None:
        memory = DeviceMemory(*_pools(model, config))
        bound = BoundModel(model, _caches(model, config, memory), config.truncation)
    else:
        memory, bound = _leading(model, config, followers)
        rules = dataclasses.replace(rules or SchedulingRules(), chunk_alignment=2 * followers.group.size)
    images, pad = ImageRows(model.config.hidden), model.config.text.vocab_size - 1
    drafts, drafting = (0 if config.role is Role.PROMPT else config.drafts), None
    if drafts:
        pool = DraftPool(config.sequences_max, drafts, bound.vocabulary, pad)
        drafting = Drafting(
            bound, pool, Limits(model.config.eos_token_id, config.max_model_len), config.determinism is Determinism.FULL
        )
    rules = dataclasses.replace(
        rules or SchedulingRules(), drafts=drafts, pad_token_id=pad, waiting_max=config.waiting_max
    )
    verify = None
    if drafts and config.verify is VerifyMode.VARLEN:
        curve = starting_curve(bound, config, curves)
        verify = VerifyLengths(VerifySettings(VerifyMode.VARLEN, drafts, config.sequences_max, curve))
    scheduler = StepScheduler(config, model.config.eos_token_id, rules, verify)
    constraints = Constraints(model.config.text.vocab_size, model.config.eos_token_id, scheduler.rules.drafts)
    runner = Runner(bound, memory, images, constraints, drafting, step_clock())
    return Engine(config, scheduler, runner, memory, images, saves_grains, constraints), memory


def build_follower(model: Model, config: EngineConfig, group: Collectives) -> Follower:
    """A rank that follows an engine of the same model and configuration, which leads `group`."""
    memory, shared = DeviceMemory(*_pools(model, config)), dataclasses.replace(model, row_exchange=group)
    return Follower(group, BoundModel(shared, _caches(model, config, memory), config.truncation), memory)


def _leading(model: Model, config: EngineConfig, followers: Followers) -> tuple[LeadingMemory, LeadingModel]:
    if config.role is not Role.PROMPT:
        raise ValueError(
            f"role = {config.role} with {followers.group.size} context-parallel ranks: they share out the rows of "
            "prompts, and a decode step has few; use role prompt, or one rank"
        )
    memory = LeadingMemory(*_pools(model, config), followers)
    shared = dataclasses.replace(model, row_exchange=followers.group)
    return memory, LeadingModel(shared, _caches(model, config, memory), config.truncation, followers)


def _pools(model: Model, config: EngineConfig) -> tuple[int, BlockLayout, int, SlotLayout]:
    shape = cache_shape(model.config, config.cache.block_tokens)
    return config.cache.blocks_count, block_layout(shape), config.cache.slots_count, slot_layout(shape)


def _caches(model: Model, config: EngineConfig, memory: DeviceMemory) -> Caches:
    return Caches(memory.blocks, memory.slots, cache_shape(model.config, config.cache.block_tokens))


def grammar_compiler(directory: Path, model: Model) -> GrammarCompiler:
    """What compiles grammars for a checkpoint's tokenizer and vocabulary; raises OSError, ValueError."""
    tokens = TokenBytes.from_json((directory / "tokenizer.json").read_text(encoding="utf-8"))
    return GrammarCompiler(tokens, model.config.text.vocab_size, model.config.eos_token_id)


def check_truncation(model: Model, config: EngineConfig) -> None:
    """Refuse a `keep` the model cannot work with, before any request meets it."""
    if config.role is not Role.COMPLETION:
        model.first_kept(config.truncation, data_len=0)
    limit = model.config.text.max_position_embeddings
    if config.max_model_len > limit:
        raise ValueError(f"max_model_len = {config.max_model_len} must be at most {limit}, the positions of the model")


def check_drafts(model: Model, config: EngineConfig) -> None:
    """Refuse drafts that the model cannot make."""
    size = model.config.text.dspark_block_size
    if config.drafts and model.drafter is None:
        raise ValueError(f"drafts = {config.drafts} needs the model's drafter, which is not loaded: set drafts to 0")
    if config.verify is VerifyMode.VARLEN and not config.drafts:
        raise ValueError("verify = varlen chooses among drafts and drafts = 0: make drafts, or write full")
    if not 0 <= config.drafts <= size:
        raise ValueError(f"drafts = {config.drafts} must lie in 0..{size}, the block of the model's drafter")
