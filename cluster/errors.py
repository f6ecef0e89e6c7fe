"""Failures of this folder that a caller can act on.

ShoalError                a mistake of the caller or operator; shown as text, never as a traceback
└── ManifestError         a manifest that cannot be read, decoded, resolved or run; exit code 2
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule of a manifest: where, the value found there, the rule, and what to do."""

    path: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} = {_shown(self.value)} {self.rule}; {self.remedy}"


class ShoalError(Exception):
    """A mistake that its maker can correct; the message says how."""


class ManifestError(ShoalError):
    """A manifest that cannot be used; `problems` lists every broken rule found, `file` names the manifest."""

    def __init__(self, file: str, problems: tuple[Problem, ...]) -> None:
        assert problems, "a ManifestError needs at least one problem"
        super().__init__("\n".join(f"{file}: {problem}" for problem in problems))
        self.file = file
        self.problems = problems


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
