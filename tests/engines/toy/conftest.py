"""A random checkpoint of the toy's configuration, drawn once."""

from pathlib import Path

import pytest
from shoal.engines.toy.build import write_random


@pytest.fixture(scope="session")
def random_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random-toy")
    write_random(directory)
    return directory
