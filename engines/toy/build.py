"""`builtin:toy`: a small random checkpoint in the published layout, built once a machine and then only read."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.engines.model.engram import EngramHash, class_map
from shoal.engines.model.save import quantised, save_checkpoint
from shoal.engines.toy.configuration import TEXT, VISION, toy_config
from shoal.engines.toy.initialise import ROW_FACTORS, RULES, SEED, random_weights
from shoal.engines.toy.tokenizer import TOKENIZER_FILE, toy_tokenizer

# Raise it when the built bytes change for a reason that `checkpoint_key` does not see.
BUILDER_VERSION = 3
FILES = ("config.json", "model.safetensors", "tokenizer.json")


def ensure_toy(cache_dir: Path | None = None) -> Path:
    """The directory of the toy checkpoint, built first if `cache_dir` (default: the user's cache) lacks it.

    Safe to call from many processes at once: each builds aside, one rename wins, and all return its directory.
    Raises OSError when the cache cannot be written.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / f"toy-{checkpoint_key()}"
    if _is_complete(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".toy-", dir=root))
    try:
        write_toy(aside)
        aside.chmod(0o755)
        try:
            aside.rename(target)
        except OSError as error:
            # Another process was first; its directory is complete, because only complete ones are renamed.
            if not _is_complete(target):
                raise OSError(f"{target}: is in the way and lacks some of {FILES}; remove it") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def write_toy(directory: Path, progress: Callable[[str], None] = lambda line: None) -> None:
    """Write the toy checkpoint into the existing `directory`, telling `progress` each step."""
    tokenizer = toy_tokenizer()
    config = toy_config(tokenizer)
    EngramHash.build(config, class_map(tokenizer))  # refuses a configuration that does not fit its tokenizer
    progress("drawing weights")
    floats = random_weights(config, tokenizer)
    progress("quantising weights")
    tensors = quantised(config, floats)
    progress(f"writing {len(tensors)} tensors to {directory}")
    shutil.copyfile(TOKENIZER_FILE, directory / "tokenizer.json")
    save_checkpoint(directory, config, tensors)


def checkpoint_key() -> str:
    """What distinguishes this builder's checkpoint from another's: 12 hex digits over all that it is built from."""
    ingredients = (BUILDER_VERSION, TEXT, VISION, SEED, RULES, ROW_FACTORS, TOKENIZER_FILE.read_bytes())
    return hashlib.sha256(repr(ingredients).encode()).hexdigest()[:12]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/shoal`, or `~/.cache/shoal`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in FILES)
