"""Build what a role needs from a checkpoint directory: an engine, or the vision tower alone."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from shoal.engines.config import EngineConfig, Role
from shoal.engines.core.layout import block_layout, slot_layout
from shoal.engines.core.rules import SchedulingRules
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.grammar.compiler import GrammarCompiler
from shoal.engines.grammar.token_bytes import TokenBytes
from shoal.engines.model.cache import Caches
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.decoder import Model
from shoal.engines.model.numerics import Mode
from shoal.engines.run.bound import BoundModel
from shoal.engines.run.constraints import Constraints
from shoal.engines.run.engine import Engine
from shoal.engines.run.inputs import ImageRows
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.runner import Runner

logger = logging.getLogger(__name__)


def load_model(directory: Path, mode: Mode = Mode.N1) -> Model:
    """The language model of a checkpoint, without vision and drafter; raises ConfigError, WeightsError."""
    model = Model.load(directory, mode, with_drafter=False)
    logger.info("loaded %s in mode %s; ops: %s", directory, mode, implementations(model))
    return model


def implementations(model: Model) -> Mapping[str, str]:
    """Which implementation each operator of this process uses; there is one so far, the torch reference."""
    torch_version = f"torch {torch.__version__} {str(model.numerics.wide).removeprefix('torch.')}"
    operators = ("linear", "attention", "indexer", "compressor", "experts", "mhc", "engram", "norm", "rope", "quant")
    return {**dict.fromkeys(operators, torch_version), "sampler": "torch float64, splitmix64"}


def build_engine(
    model: Model, config: EngineConfig, saves_grains: bool = False, rules: SchedulingRules | None = None
) -> tuple[Engine, DeviceMemory]:
    """An engine of one rank over a loaded model, and the memory a transfer library registers.

    Several engines may share one model: it is never written. Raises ValueError for settings that contradict the
    model or each other.
    """
    check_truncation(model, config)
    shape = cache_shape(model.config, config.cache.block_tokens)
    memory = DeviceMemory(config.cache.blocks_count, block_layout(shape), config.cache.slots_count, slot_layout(shape))
    images = ImageRows(model.config.hidden)
    caches = Caches(memory.blocks, memory.slots, shape)
    scheduler = StepScheduler(config, model.config.eos_token_id, rules)
    constraints = Constraints(model.config.text.vocab_size, model.config.eos_token_id, scheduler.rules.drafts)
    runner = Runner(BoundModel(model, caches, config.truncation), memory, images, constraints)
    return Engine(config, scheduler, runner, memory, images, saves_grains, constraints), memory


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
