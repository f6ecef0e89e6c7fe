"""Exhaustive search over two real ledgers: no freed memory is ever written, every ticket ends, nothing leaks."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from shoal.cluster.core import target_ledger
from shoal.cluster.core.source_ledger import SourceLedger

from tests.cluster.handoff_model import Faults, State, ViolationError, first, steps

STATES_MAX = 40_000


def explore(faults: Faults) -> tuple[dict[object, State], dict[object, list[object]]]:
    """Every reachable state and, backwards, which states lead to it; raises ViolationError with the path."""
    start = first(faults)
    seen: dict[object, State] = {start.key(): start}
    came: dict[object, tuple[object, str] | None] = {start.key(): None}
    back: dict[object, list[object]] = {}
    queue = deque([start.key()])
    while queue:
        key = queue.popleft()
        try:
            for name, following in steps(seen[key]):
                target = following.key()
                back.setdefault(target, []).append(key)
                if target not in seen:
                    came[target] = (key, name)
                    seen[target] = following
                    following.check()
                    queue.append(target)
        except AssertionError as error:
            raise ViolationError(f"{error}\nafter {path(came, key)}") from error
        assert len(seen) <= STATES_MAX, "the model is no longer small"
    return seen, back


def path(came: dict[object, tuple[object, str] | None], key: object) -> list[str]:
    names = []
    while (step := came[key]) is not None:
        key, name = step
        names.append(name)
    return names[::-1]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(abort=1),
        Faults(drop=1),
        Faults(repeat=1),
        Faults(abort=1, repeat=1),
        Faults(abort=1, drop=1),
        Faults(fail=1, abort=1, lose_source=1),
        Faults(lose_target=1, abort=1),
    ],
    ids=repr,
)
def test_every_interleaving_is_safe_and_can_end(faults: Faults) -> None:
    seen, back = explore(faults)
    quiet = [key for key, state in seen.items() if state.is_quiet]
    assert quiet
    can_end = set(quiet)
    queue = deque(quiet)
    while queue:
        for key in back.get(queue.popleft(), ()):
            if key not in can_end:
                can_end.add(key)
                queue.append(key)
    stuck = [seen[key] for key in seen if key not in can_end]
    assert not stuck, f"{len(stuck)} of {len(seen)} states cannot end, for example {stuck[0]}"
    assert any(s.target_memory == "sequence" for s in seen.values()), "no path admits: the model is vacuous"


@pytest.mark.parametrize("fault", ["freed before the acknowledgement", "acknowledged while writing", "ended forgotten"])
def test_the_search_finds_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing anywhere would prove nothing."""
    if fault == "freed before the acknowledgement":
        monkeypatch.setattr(target_ledger, "_MAY_BE_WRITTEN", ())
    elif fault == "acknowledged while writing":
        settle = SourceLedger._settle
        monkeypatch.setattr(SourceLedger, "_settle", lambda self, entry: settle(self, replace(entry, in_flight=0)))
    else:
        monkeypatch.setattr(SourceLedger, "accept", _forgetful(SourceLedger.accept))
    with pytest.raises(ViolationError):
        explore(Faults(abort=1, repeat=1))


def _forgetful(accept: Callable[..., object]) -> Callable[..., object]:
    def forget_and_accept(self: SourceLedger, ticket: object, now_us: int) -> object:
        self._ended.clear()
        return accept(self, ticket, now_us)

    return forget_and_accept
