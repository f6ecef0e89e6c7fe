"""The `shoal` command as a user types it: its own process, its own state and data folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands.shell import Shell


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in ("test_lifecycle.py", "test_job.py", "test_groups.py"):
            item.add_marker(pytest.mark.live)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A user's shell; whatever a failed test leaves up is ended."""
    shell = Shell(tmp_path)
    yield shell
    shell.clean_up()
