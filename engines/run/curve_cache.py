"""Measured step curves kept in a directory, so that an engine that comes up again need not measure."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.engines.core.verify.curve import StepCurve

TTL_S = 3600
# How long past its time a file stays: whoever listed the directory may still be about to read it.
GRACE_S = 2 * 3600
# A file may be this much younger than now: clocks of machines that share a directory differ.
SKEW_S = 60
_NAME = re.compile(r"shoal-curve\.([0-9a-f]{64})\.([0-9a-f]{32})\.([0-9]{1,12})\.(json|tmp)")


@dataclass(frozen=True, slots=True)
class CurveKey:
    """All that a curve depends on: two engines with equal keys may share one.

    `hardware` names the accelerator and how many its host has, `versions` the software that runs on it as (name,
    version) pairs, kernel settings included. The published engine leaves both out, and reuses a stranger's curve.
    """

    model: str
    sizes: tuple[int, ...]
    dp: int
    cp: int
    ep: int
    hardware: str
    versions: tuple[tuple[str, str], ...]
    unit: str = "ms"

    def digest(self) -> str:
        """64 hex digits; versions count in any order."""
        fields = {**asdict(self), "versions": sorted(self.versions)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class CurveCache:
    """Curves in `directory`, one file each: `shoal-curve.<key>.<random>.<unix seconds>.json`.

    One rank of a group reads, writes and tells the others. Several groups may share the directory: a file appears
    whole or not at all, and nobody touches a file whose name is not of this form.
    """

    def __init__(self, directory: Path, ttl_s: int = TTL_S) -> None:
        """`ttl_s`: how old a curve may be. Raises ValueError below 1."""
        if ttl_s < 1:
            raise ValueError(f"ttl_s = {ttl_s} must be at least 1: leave the cache out to measure at every start")
        self.directory = directory
        self.ttl_s = ttl_s

    def read(self, key: CurveKey, now_s: int) -> StepCurve | None:
        """The newest curve of `key` that is young enough and readable, or None."""
        digest = key.digest()
        found = [(made_s, path) for path, owner, made_s in self._files() if owner == digest and path.suffix == ".json"]
        for made_s, path in sorted(found, reverse=True):
            if -SKEW_S <= now_s - made_s <= self.ttl_s:
                curve = _load(path)
                if curve is not None and curve.sizes == key.sizes:
                    return curve
        return None

    def write(self, key: CurveKey, curve: StepCurve, now_s: int) -> Path:
        """Keep a curve that was measured at `now_s`, and remove what is long past its time; returns the file.

        Makes the directory. Raises OSError where it cannot be written, and ValueError for a curve of other sizes.
        """
        if curve.sizes != key.sizes:
            raise ValueError(f"a curve of sizes {list(curve.sizes)} for a key of sizes {list(key.sizes)}")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"shoal-curve.{key.digest()}.{uuid.uuid4().hex}.{now_s}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"key": asdict(key), "sizes": curve.sizes, "ms": curve.ms}))
        os.replace(unfinished, path)
        self.purge(now_s)
        return path

    def purge(self, now_s: int) -> tuple[Path, ...]:
        """Remove curves, unfinished ones too, that are older than their time and a grace; returns what this removed."""
        removed = []
        for path, _, made_s in self._files():
            if now_s - made_s > self.ttl_s + GRACE_S:
                with suppress(FileNotFoundError):  # another engine was faster
                    path.unlink()
                    removed.append(path)
        return tuple(removed)

    def _files(self) -> Iterator[tuple[Path, str, int]]:
        """(path, digest, unix seconds) of our files, by name."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and path.is_file() and not path.is_symlink():
                yield path, match[1], int(match[3])


def _load(path: Path) -> StepCurve | None:
    """The curve in a file; None if it went meanwhile or is damaged."""
    try:
        fields = json.loads(path.read_text())
        return StepCurve(tuple(map(int, fields["sizes"])), tuple(map(float, fields["ms"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
