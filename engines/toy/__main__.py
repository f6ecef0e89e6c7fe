"""`python -m shoal.engines.toy DIR` writes the toy checkpoint into DIR."""

import sys
from pathlib import Path

from shoal.engines.toy.build import write_toy

USAGE = "usage: python -m shoal.engines.toy DIR   (writes the builtin:toy checkpoint into DIR)"


def main(arguments: list[str]) -> int:
    """Write the checkpoint into the one directory given; 2 for wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    if directory.is_dir() and any(directory.iterdir()):
        print(f"{directory}: is not empty; name a new directory", file=sys.stderr)
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    write_toy(directory, lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
