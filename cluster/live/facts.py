"""Reads the facts resolving needs: sizes from a checkpoint's own files, memory and disk from this machine."""

from pathlib import Path

import psutil
from shoal.cluster.errors import ShoalError
from shoal.cluster.facts import Facts, MachineFacts, ModelFacts
from shoal.engines.config import CacheConfig
from shoal.engines.core.layout import block_layout, slot_layout
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import ConfigError, WeightsError
from shoal.engines.model.weights import read_header
from shoal.engines.toy.build import ensure_toy

DRAFTER_PREFIX = "mtp."
VISION_PREFIXES = ("vision.", "aligner.", "projector.")


def model_directory(path: str) -> Path:
    """The checkpoint directory a manifest's `model.path` names. Raises WeightsError for a damaged `builtin:toy`."""
    return ensure_toy() if path == "builtin:toy" else Path(path)


def api_keys(file: str | None) -> tuple[str, ...]:
    """The keys that clients may use, one a line; () if no file is named. ShoalError if it holds none.

    No keys at all would admit everybody, which is not what somebody who names a file wants.
    """
    if file is None:
        return ()
    try:
        keys = tuple(filter(None, map(str.strip, Path(file).read_text(encoding="utf-8").splitlines())))
    except (OSError, ValueError) as error:
        raise ShoalError(f"api.keys = {file} cannot be read: {error}; give a text file with one key a line") from error
    if not keys:
        raise ShoalError(f"api.keys = {file} holds no key; write one a line, or leave api.keys out to admit everybody")
    return keys


def tls_identity(files: tuple[str, str]) -> tuple[bytes, bytes]:
    """Certificate and key of the store's gateway, PEM. ShoalError if a file cannot be read."""
    pems = []
    for name, file in zip(("certificate", "key"), files, strict=True):
        try:
            pems.append(Path(file).read_bytes())
        except OSError as error:
            raise ShoalError(f"api.grpc_tls.{name} = {file} cannot be read: {error}; give a PEM file") from error
    return pems[0], pems[1]


def served_name(path: str) -> str:
    """The model name clients use: `shoal-toy`, or the name of the checkpoint's directory."""
    return "shoal-toy" if path == "builtin:toy" else Path(path).resolve().name


def read_facts(path: str, disk: Path) -> Facts:
    """Facts of the checkpoint that `model.path` names, and of this machine with the disk that holds `disk`.

    Raises ShoalError if the checkpoint cannot be read.
    """
    directory = model_directory(path)
    try:
        model = _model_facts(directory, served_name(path))
    except (ConfigError, WeightsError) as error:
        raise ShoalError(f"{directory}: {error}") from error
    at = next(p for p in (disk.absolute(), *disk.absolute().parents) if p.exists())
    memory = psutil.virtual_memory().total
    return Facts(model, MachineFacts(memory, psutil.disk_usage(str(at)).free, psutil.cpu_count() or 1))


def _model_facts(directory: Path, name: str) -> ModelFacts:
    config = ModelConfig.from_dir(directory)
    shape = cache_shape(config, CacheConfig().block_tokens)
    blocks, slots = block_layout(shape), slot_layout(shape)
    weights_bytes = vision_bytes = 0
    has_drafter = False
    for file in sorted(directory.glob("*.safetensors")):
        for tensor, entry in read_header(file).items():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            has_drafter |= tensor.startswith(DRAFTER_PREFIX)
            if tensor.startswith(VISION_PREFIXES):
                vision_bytes += size
            else:
                weights_bytes += size
    return ModelFacts(
        name=name,
        positions_max=config.text.max_position_embeddings,
        window=config.window,
        backtracking=config.backtracking,
        block_tokens=blocks.block_tokens,
        block_bytes=blocks.block_bytes,
        slot_bytes=slots.slot_bytes,
        stored_bytes=slots.stored_bytes,
        hidden=config.hidden,
        weights_bytes=weights_bytes,
        vision_bytes=vision_bytes,
        vocabulary=config.text.vocab_size,
        drafts_max=config.text.dspark_block_size if has_drafter else 0,
    )
