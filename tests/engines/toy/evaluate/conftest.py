"""The toy's examination room, loaded once."""

from pathlib import Path

import pytest
from shoal.engines.model.numerics import Mode
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.evaluate.room import Room


@pytest.fixture(scope="session")
def toy_dir() -> Path:
    return ensure_toy()


@pytest.fixture(scope="session")
def room(toy_dir: Path) -> Room:
    return Room.open(toy_dir, Mode.N1)
