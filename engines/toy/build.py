"""`builtin:toy`: the trained checkpoint shipped beside this code and checked before use, or a random one like it."""

import hashlib
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from shoal.engines.model.engram import EngramHash, class_map
from shoal.engines.model.errors import WeightsError
from shoal.engines.model.save import quantised, save_checkpoint
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.initialise import random_weights
from shoal.engines.toy.tokenizer import TOKENIZER_FILE, toy_tokenizer

SHIPPED = TOKENIZER_FILE.parent
SUMS = "SHA256SUMS"
# How a file begins that stands for another one, in a checkout without Git LFS.
LFS_POINTER = b"version https://git-lfs"


@cache
def ensure_toy() -> Path:
    """The directory of the trained toy, to be read only; its files are compared with their checksums once a process.

    Raises WeightsError when a file is missing or is not the one that was shipped.
    """
    return verified(SHIPPED)


def verified(directory: Path) -> Path:
    """`directory`, if it holds exactly the checkpoint files that its SHA256SUMS lists. Raises WeightsError."""
    listed = read_sums(directory / SUMS)
    for name, digest in listed.items():
        path = directory / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read ({error.strerror}); check out or install shoal anew") from error
        if data.startswith(LFS_POINTER):
            raise WeightsError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull`")
        if hashlib.sha256(data).hexdigest() != digest:
            raise WeightsError(f"{path}: differs from its sum in {SUMS}; check out or install shoal anew")
    stray = {path.name for path in checkpoint_files(directory)} - set(listed)
    if stray:
        raise WeightsError(f"{directory}: {sorted(stray)} are not listed in {SUMS}; remove them")
    return directory


def read_sums(path: Path) -> dict[str, str]:
    """The SHA-256 of each file by its name, from lines of `sha256sum`. Raises WeightsError."""
    try:
        pairs = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        return {name: digest for digest, name in pairs}
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read ({error}); check out or install shoal anew") from error


def checkpoint_files(directory: Path) -> list[Path]:
    """The files of the checkpoint in `directory`, by name: configuration, tokenizer, weights and their index."""
    return sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])


def write_random(directory: Path, progress: Callable[[str], None] = lambda line: None) -> None:
    """Write a random checkpoint of the toy's configuration into the existing `directory`, telling `progress` each step.

    Equal on every machine.
    """
    tokenizer = toy_tokenizer()
    config = toy_config(tokenizer)
    EngramHash.build(config, class_map(tokenizer))  # refuses a configuration that does not fit its tokenizer
    progress("drawing weights")
    floats = random_weights(config, tokenizer)
    progress("quantising weights")
    tensors = quantised(config, floats)
    progress(f"writing {len(tensors)} tensors to {directory}")
    shutil.copyfile(TOKENIZER_FILE, directory / TOKENIZER_FILE.name)
    save_checkpoint(directory, config, tensors)
