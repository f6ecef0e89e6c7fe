"""What the commands' HTTP client sends besides the body."""

import pytest
from shoal.cluster.commands.client import key_header


def test_the_key_comes_from_the_environment_and_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert key_header() == {}
    monkeypatch.setenv("SHOAL_API_KEY", "sk-1")
    assert key_header() == {"authorization": "Bearer sk-1"}
