"""A file of API keys that holds none must not open the door."""

from pathlib import Path

import pytest
from shoal.cluster.errors import ShoalError
from shoal.cluster.live.facts import api_keys


def test_keys_are_lines(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n  two \n")
    assert api_keys(str(tmp_path / "keys")) == ("one", "two")
    assert api_keys(None) == ()


def test_an_empty_file_is_a_mistake_and_not_everybody(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(ShoalError, match="holds no key"):
        api_keys(str(tmp_path / "keys"))
    with pytest.raises(ShoalError, match="cannot be read"):
        api_keys(str(tmp_path / "missing"))
