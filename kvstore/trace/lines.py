"""Lines of a trace file, plain or gzip, one at a time, and the errors that name file, line, field and rule."""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec
from shoal.kvstore.errors import TraceError

T = TypeVar("T")
_GZIP = b"\x1f\x8b"
_AT = re.compile(r"^(?P<rule>.*?) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) of every line that is not blank; TraceError if it cannot be read."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, number + 1, "file", f"cannot be read: {error}") from None


def decode_line(decoder: "msgspec.json.Decoder[T]", path: Path, number: int, line: bytes) -> T:
    """The object on a line of JSON; TraceError if it does not fit the decoder's type."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        text = str(error)
        if missing := _MISSING.match(text):
            field = ".".join(part for part in (missing["path"], missing["field"]) if part)
            raise TraceError(path, number, field, "must be given") from None
        found = _AT.match(text)
        rule, field = (found["rule"], found["path"]) if found else (text, "the line")
        raise TraceError(path, number, field or "the line", f"must hold: {rule[0].lower()}{rule[1:]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, number, "the line", f"must be one JSON object: {error}") from None


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")
