"""What replaying one entry came to, and the smallest useful description of a difference."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """PASSED and FAILED were compared; NOT_YET is about behaviour that this core does not have."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one entry; `differences` are lines `path: expected …, got …`."""

    kind: str
    entry_id: str
    outcome: Outcome
    differences: tuple[str, ...] = ()


class NotYetError(Exception):
    """The entry exercises behaviour that this core does not have yet."""


class MalformedError(Exception):
    """The entry does not follow the fixture schema."""


def differences(expected: Any, got: Any, path: str) -> list[str]:
    """Every place where two values of maps, lists and scalars differ; tuples count as lists."""
    if isinstance(expected, dict) and isinstance(got, dict):
        found = []
        for key in sorted({*expected, *got}, key=str):
            if key in expected and key in got:
                found += differences(expected[key], got[key], f"{path}.{key}")
            else:
                found.append(f"{path}.{key}: expected {expected.get(key)!r}, got {got.get(key)!r}")
        return found
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return [f"{path}: expected {list(expected)!r}, got {list(got)!r}"]
        return [
            line
            for index, (one, other) in enumerate(zip(expected, got, strict=True))
            for line in differences(one, other, f"{path}[{index}]")
        ]
    return [] if expected == got else [f"{path}: expected {expected!r}, got {got!r}"]
