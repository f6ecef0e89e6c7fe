"""Comparing one array with its reference: the rules, their results and the list of what was left over."""

import fnmatch
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class FixtureError(ValueError):
    """The reference arrays are missing, unreadable or contradict each other; the text says which and what to do."""


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name, or the one of an .npy file under its stem; raises FixtureError."""
    try:
        loaded = np.load(path)
        if isinstance(loaded, np.ndarray):
            return {path.stem: loaded}
        with loaded:
            return dict(loaded)
    except FileNotFoundError as error:
        raise FixtureError(f"{path}: is missing; put the reference arrays beside the checkpoint") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FixtureError(
            f"{path}: cannot be read as arrays without pickles ({error}); copy or make it again"
        ) from error


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `difference` and `tolerance` are None where only equality counts."""

    name: str
    passed: bool
    difference: float | None
    tolerance: float | None
    detail: str

    def line(self) -> str:
        """The finding as printed."""
        mark = "ok  " if self.passed else "FAIL"
        number = "" if self.difference is None else f" {self.difference:.2e}"
        limit = "" if self.tolerance is None else f" (<= {self.tolerance:g})"
        return f"{mark} {self.name}:{number}{limit} {self.detail}"


@dataclass(slots=True)
class Reference:
    """The arrays of one file, and which of them have been compared or used as input."""

    file: str
    arrays: Mapping[str, Array]
    findings: list[Finding] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the file holds `name`."""
        return name in self.arrays

    def take(self, name: str) -> Array:
        """An array as input; it counts as understood. Raises FixtureError if the file lacks it."""
        if name not in self.arrays:
            raise FixtureError(
                f"{self.file}: lacks {name}, which its other arrays need; write it too, or leave them out"
            )
        self.used.add(name)
        array: Array = self.arrays[name]
        return array

    def floats(self, name: str) -> Array:
        """An array as float64; uint16 holds raw bfloat16."""
        array = self.take(name)
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)

    def near(self, name: str, got: Tensor, tolerance: float = 1e-4, rows: int | None = None) -> None:
        """Largest difference in the first `rows`, over the reference's span, at most `tolerance`; infinities agree."""
        if not self.has(name):
            return
        want, have = self.floats(name), numbers(got)
        if self._misshaped(name, want, have):
            return
        finite = np.isfinite(want)
        span = _span(want)
        want, have, finite = want[:rows], have[:rows], finite[:rows]
        if not np.array_equal(want[~finite], have[~finite]):
            self._add(name, False, None, tolerance, "infinite values differ")
            return
        worst = float(np.abs(want[finite] - have[finite]).max(initial=0.0)) / span
        self._add(name, worst <= tolerance, worst, tolerance, "of span")

    def close(self, name: str, got: Tensor, tolerance: float = 1e-4) -> None:
        """Largest absolute difference at most `tolerance`."""
        if not self.has(name):
            return
        want, have = self.floats(name), numbers(got)
        if not self._misshaped(name, want, have):
            worst = float(np.abs(want - have).max(initial=0.0))
            self._add(name, worst <= tolerance, worst, tolerance, "absolute")

    def alike(self, name: str, got: Tensor, tolerance: float, least_argmax: float | None = None) -> None:
        """Mean difference over the span at most `tolerance`; rows with an equal argmax at least `least_argmax`."""
        if not self.has(name):
            return
        want, have = self.floats(name), numbers(got)
        if self._misshaped(name, want, have):
            return
        finite = np.isfinite(want)
        mean = float(np.abs(want[finite] - have[finite]).mean()) / _span(want)
        passed, detail = mean <= tolerance, "of span, mean"
        if least_argmax is not None:
            agreement = float((want.argmax(-1) == have.argmax(-1)).mean())
            passed, detail = passed and agreement >= least_argmax, f"of span, mean; argmax equal {agreement:.0%}"
        self._add(name, passed, mean, tolerance, detail)

    def reported(self, name: str, got: Tensor) -> None:
        """Mean difference and argmax agreement, never a failure."""
        if not self.has(name):
            return
        want, have = self.floats(name), numbers(got)
        if self._misshaped(name, want, have):
            return
        agreement = float((want.argmax(-1) == have.argmax(-1)).mean())
        mean = float(np.abs(want - have).mean()) / _span(want)
        self._add(name, True, mean, None, f"of span, mean; argmax equal {agreement:.0%} (reported only)")

    def equal(self, name: str, got: Tensor | Array, where: Array | None = None, is_strict: bool = True) -> None:
        """Every value equal; floats bit for bit. `where` limits the comparison; only reported if not strict."""
        if not self.has(name):
            return
        want = self.take(name)
        have = got.detach().cpu().numpy() if isinstance(got, Tensor) else np.asarray(got)
        if self._misshaped(name, want, have):
            return
        if want.dtype == np.float32:
            want, have = want.view(np.int32), have.astype(np.float32).view(np.int32)
        differs = want != have
        count = int((differs if where is None else differs & where).sum())
        detail = "equal" if not count else f"{count} of {want.size} values differ"
        self._add(name, not count or not is_strict, None, None, detail + ("" if is_strict else " (reported only)"))

    def equal_sets(self, name: str, got: Tensor, is_strict: bool = True) -> None:
        """The same members in each row of the last dimension, -1 meaning none; only reported if not strict."""
        if not self.has(name):
            return
        want, have = self.take(name).astype(np.int64), numbers(got).astype(np.int64)
        width = max(want.shape[-1], have.shape[-1])
        want, have = (_padded_sorted(a, width) for a in (want, have))
        if self._misshaped(name, want, have):
            return
        rows = (want != have).any(-1)
        detail = "equal sets" if not rows.any() else f"{int(rows.sum())} of {rows.size} sets differ"
        self._add(name, not rows.any() or not is_strict, None, None, detail + ("" if is_strict else " (reported only)"))

    def leftovers(self, known: Sequence[str]) -> list[Finding]:
        """One finding for each array that nothing compared; a failure if its name is one that should be."""
        findings = []
        for name in sorted(set(self.arrays) - self.used):
            is_known = any(fnmatch.fnmatchcase(name, pattern) for pattern in known)
            detail = "not compared, although its name is documented" if is_known else "not understood"
            findings.append(Finding(f"{self.file} {name}", not is_known, None, None, detail))
        return findings

    def _misshaped(self, name: str, want: Array, have: Array) -> bool:
        if want.shape != have.shape:
            self._add(name, False, None, None, f"shape {have.shape}, reference {want.shape}")
            return True
        return False

    def _add(self, name: str, passed: bool, difference: float | None, tolerance: float | None, detail: str) -> None:
        self.findings.append(Finding(f"{self.file} {name}", bool(passed), difference, tolerance, detail))


def numbers(value: Tensor) -> Array:
    """A tensor as float64 numpy."""
    array: Array = value.detach().to(torch.float64).cpu().numpy()
    return array


def stems(names: Iterable[str], suffix: str) -> list[str]:
    """What stands before `suffix` in those names that end with it, in order of appearance."""
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _span(values: Array) -> float:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 1.0
    # A single value, or a constant, has no span: its size stands in (the confidence of a draft block of one).
    spread = float(finite.max() - finite.min()) or float(np.abs(finite).max())
    return max(spread, 1e-30)


def _padded_sorted(rows: Array, width: int) -> Array:
    missing = width - rows.shape[-1]
    return np.sort(np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], constant_values=-1), axis=-1)
