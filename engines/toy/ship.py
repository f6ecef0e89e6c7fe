"""`python -m shoal.engines.toy.ship CHECKPOINT`: make a checkpoint of the toy the one that `builtin:toy` names."""

import hashlib
import shutil
import sys
from pathlib import Path

from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import CheckpointError, WeightsError
from shoal.engines.model.weights import load_model_weights
from shoal.engines.toy.build import SHIPPED, SUMS, checkpoint_files, verified
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tokenizer import TOKENIZER_FILE, toy_tokenizer

USAGE = "usage: python -m shoal.engines.toy.ship CHECKPOINT   (the directory that training wrote)"
BYTES_MAX = 40_000_000
"""Weights that a repository can carry."""


def ship(checkpoint: Path, target: Path = SHIPPED) -> Path:
    """Replace the checkpoint in `target` by this one and write its sums.

    Raises CheckpointError if it is not a complete checkpoint of the toy's configuration and tokenizer, or too large.
    """
    config = ModelConfig.from_dir(checkpoint)
    if config != toy_config(toy_tokenizer()):
        raise WeightsError(f"{checkpoint}/config.json: is not the toy's configuration; train with this checkout")
    if (checkpoint / TOKENIZER_FILE.name).read_bytes() != TOKENIZER_FILE.read_bytes():
        raise WeightsError(f"{checkpoint}/{TOKENIZER_FILE.name}: is not the toy's tokenizer; train with this checkout")
    load_model_weights(checkpoint, config)
    files = checkpoint_files(checkpoint)
    size = sum(path.stat().st_size for path in files)
    if size > BYTES_MAX:
        raise WeightsError(
            f"{checkpoint}: has {size} bytes, at most {BYTES_MAX} can be shipped; make the model smaller"
        )
    for old in checkpoint_files(target):
        if old.name != TOKENIZER_FILE.name:
            old.unlink()
    sums = []
    for path in files:
        shutil.copyfile(path, target / path.name)
        sums.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (target / SUMS).write_text("".join(sums), encoding="utf-8")
    return verified(target)


def main(arguments: list[str]) -> int:
    """Ship the one directory given; 1 for a checkpoint that cannot be shipped, 2 for wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        target = ship(Path(arguments[0]))
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target}: {', '.join(p.name for p in checkpoint_files(target))}; commit them with {SUMS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
