"""`python -m shoal.cluster.up MANIFEST`: deploy and leave running, for `ray job submit` from a checkout."""

from pathlib import Path
from typing import Annotated

import typer
from shoal.cluster.commands.operate import up


def deploy(manifest: Annotated[Path, typer.Argument(metavar="MANIFEST")], run_dir: Path | None = None) -> None:
    """Deploy MANIFEST on the Ray this job runs on and return when it serves."""
    up(manifest, address=None, detach=True, run_dir=run_dir)


if __name__ == "__main__":
    typer.run(deploy)
