"""`python -m shoal.engines.toy DIR [--random]` writes the checkpoint of `builtin:toy`, or a random one, into DIR."""

import shutil
import sys
from pathlib import Path

from shoal.engines.model.errors import CheckpointError
from shoal.engines.toy.build import checkpoint_files, ensure_toy, write_random

USAGE = (
    "usage: python -m shoal.engines.toy DIR [--random]   (copies the builtin:toy checkpoint, or draws one, into DIR)"
)


def main(arguments: list[str]) -> int:
    """Write a checkpoint into the one directory given; 1 if there is none to copy, 2 for wrong usage."""
    names = [argument for argument in arguments if argument != "--random"]
    if len(names) != 1 or names[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    directory = Path(names[0])
    if directory.is_dir() and any(directory.iterdir()):
        print(f"{directory}: is not empty; name a new directory", file=sys.stderr)
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    if "--random" in arguments:
        write_random(directory, lambda line: print(line, flush=True))
        return 0
    try:
        files = checkpoint_files(ensure_toy())
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    for path in files:
        shutil.copyfile(path, directory / path.name)
    print(f"copied {len(files)} files to {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
