"""Durations and sizes as manifests write them: `3d 12h`, `250ms`, `64MiB`, `1.5TB`; plain integers inside."""

import re
from decimal import Decimal
from typing import Self

_DURATIONS_US = {
    "d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1,
}  # fmt: skip
_SIZES_BYTES = {"B": 1}
_SIZES_BYTES |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGTP")}
_SIZES_BYTES |= {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGTP")}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class Duration(int):
    """Microseconds, written as one or more `<number><unit>` with units d, h, m, s, ms, us."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """Microseconds of `text`; a ValueError says the rule."""
        return cls(_total(text, _DURATIONS_US, "a duration such as 30s, 250ms or 3d 12h (units d, h, m, s, ms, us)"))

    def __str__(self) -> str:
        if self == 0:
            return "0s"
        rest, parts = int(self), []
        for unit, scale in _DURATIONS_US.items():
            count, rest = divmod(rest, scale)
            if count:
                parts.append(f"{count}{unit}")
        return " ".join(parts)


class Size(int):
    """Bytes, written as `<number><unit>` with units B, kB, MB, GB, TB, PB or KiB, MiB, GiB, TiB, PiB."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """Bytes of `text`; a ValueError says the rule."""
        return cls(_total(text, _SIZES_BYTES, "a size such as 64MiB or 1.5TB (units B, kB..PB, KiB..PiB)"))

    def __str__(self) -> str:
        for unit, scale in reversed(_SIZES_BYTES.items()):
            if unit.endswith("iB") and self >= scale and self % scale == 0:
                return f"{self // scale}{unit}"
        for unit, scale in reversed(_SIZES_BYTES.items()):
            if not unit.endswith("iB") and self >= scale and self % (scale // 1000 or 1) == 0:
                return f"{self / scale:g}{unit}" if scale > 1 else f"{int(self)}B"
        return f"{int(self)}B"


def _total(text: object, units: dict[str, int], rule: str) -> int:
    if not isinstance(text, str):
        raise ValueError(f"must be {rule}, not {type(text).__name__}")
    total, position = Decimal(0), 0
    stripped = text.strip()
    while position < len(stripped):
        part = _PART.match(stripped, position)
        if part is None or part[2] not in units:
            raise ValueError(f"must be {rule}")
        total += Decimal(part[1]) * units[part[2]]
        position = part.end()
        while position < len(stripped) and stripped[position] == " ":
            position += 1
    if not stripped or total != int(total):
        raise ValueError(f"must be {rule}")
    return int(total)
