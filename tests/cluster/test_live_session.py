"""Records of running clusters: private, and never taken for a process that only has the same number."""

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from shoal.cluster.live.session import Session, SessionError, family, find, free_port, record, require_free, sessions


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose head is this very process."""
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
    pid = os.getpid()
    return Session("one", "127.0.0.1:1", "secret", pid, "no-such-mark", born_s=psutil.Process(pid).create_time())


def test_a_record_is_found_again_and_private(own: Session, tmp_path: Path) -> None:
    record(own)
    assert find(None) == find("one") == own
    mode = stat.S_IMODE((tmp_path / "state" / "one.json").stat().st_mode)
    assert mode & 0o077 == 0, "the record holds a token"


def test_a_process_that_took_over_the_number_is_not_ours(own: Session) -> None:
    """As after a reboot: ending the cluster must not end a stranger and its children."""
    old = replace(own, born_s=own.born_s - 3600)
    assert family(old) == []
    record(old)
    assert sessions() == []
    with pytest.raises(SessionError, match="no cluster is up"):
        find(None)


def test_an_address_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SessionError, match=r"cannot listen on 127\.0\.0\.1:\d+ .*api\.http"):
            require_free("127.0.0.1", other.getsockname()[1])
    require_free("127.0.0.1", free_port())
