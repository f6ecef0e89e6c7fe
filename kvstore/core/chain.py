"""Chain keys: the name of each grain is a cryptographic hash of everything its KV bytes depend on.

key(i) = H(tag ‖ key(i-1) ‖ content(i)), key(-1) = H(version ‖ namespace ‖ grain size). Every field is typed and
length-prefixed, so two different inputs never give one byte string: a client's salt cannot imitate an adapter,
an image's digest is never squeezed through token ids, and another truncation mode is another namespace.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt
from shoal.kvstore.errors import ObjectError

CHAIN_VERSION = 1
# sha256 is the fastest cryptographic hash for half a kilobyte here (0.6 us; measured against blake2 and blake3), and
# 128 bits leave 2^64 work to make one collision and 2^128 to hit another tenant's key.
KEY_BYTES = 16
GRAIN_TOKENS = 128
_ROOT_TAG = b"shoal chain root"
_GRAIN_TAG = b"grain\0\0\0"
_IMAGE_TAG = b"image\0\0\0"
_HEAD = struct.Struct("<8s16sII")  # tag, parent key, tokens, images
_IMAGE = struct.Struct("<8sqqIII")  # tag, start in the grain, length, rows, columns, digest bytes


class Span(Protocol):
    """What a chain key needs to know of an image in the prompt (an engine's ImageSpan fits)."""

    @property
    def start(self) -> int:
        """Position of the first placeholder token."""

    @property
    def length(self) -> int:
        """Placeholder tokens, delimiters included."""

    @property
    def grid_rows(self) -> int:
        """Rows of image tokens."""

    @property
    def grid_columns(self) -> int:
        """Columns of image tokens."""

    @property
    def digest(self) -> bytes:
        """Digest of the preprocessed pixels."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens and images that KV bytes depend on; two namespaces never share a key.

    `model` and `revision` name the weights, `kv_format` the layout of a block and slot, `precision` the numerics,
    `truncation` the rule for the decoder layers, `adapter` a loaded adapter (None: none, which is not ""), and
    `tenant_salt` keeps tenants apart.
    """

    model: str
    revision: str
    kv_format: str
    precision: str
    truncation: str = "off"
    adapter: str | None = None
    tenant_salt: bytes = b""


def root_key(namespace: Namespace, grain_tokens: int = GRAIN_TOKENS) -> bytes:
    """The key before the first grain: 16 bytes that depend on every field of the namespace and the grain size."""
    if grain_tokens < 1:
        raise ObjectError(
            f"grain_tokens = {grain_tokens} must be at least 1; the model's block size is the usual value"
        )
    fields: tuple[tuple[str, str | bytes | None], ...] = (
        ("model", namespace.model),
        ("revision", namespace.revision),
        ("kv_format", namespace.kv_format),
        ("precision", namespace.precision),
        ("truncation", namespace.truncation),
        ("adapter", namespace.adapter),
        ("tenant_salt", namespace.tenant_salt),
    )
    parts = [_ROOT_TAG, struct.pack("<II", CHAIN_VERSION, grain_tokens)]
    for name, value in fields:
        kind = b"N" if value is None else b"S" if isinstance(value, str) else b"B"
        raw = b"" if value is None else value.encode() if isinstance(value, str) else value
        parts += [_prefixed(name.encode()), kind, _prefixed(raw)]
    return sha256(b"".join(parts)).digest()[:KEY_BYTES]


def chain_keys(
    namespace: Namespace,
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    spans: Sequence[Span] = (),
    grain_tokens: int = GRAIN_TOKENS,
) -> tuple[bytes, ...]:
    """One 16-byte key for each FULL grain of the tokens, in order; a partial last grain has no key.

    `token_ids`: 0 <= id < 2^32; an integer array is read without conversion. `spans` need not be sorted.
    About 1 us a grain.
    """
    return extend_chain(root_key(namespace, grain_tokens), token_ids, spans, grain_tokens)


def extend_chain(
    parent: bytes,
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    spans: Sequence[Span] = (),
    grain_tokens: int = GRAIN_TOKENS,
) -> tuple[bytes, ...]:
    """Keys of the full grains of `token_ids`, which follow the grain named `parent` (or a root key).

    Positions in `spans` count from the first of `token_ids`; a span that began earlier has a negative start. So a
    decoding engine adds one key per grain without hashing its past again.
    """
    if len(parent) != KEY_BYTES:
        raise ObjectError(f"parent key of {len(parent)} bytes; must be {KEY_BYTES}: a root key or a chain key")
    tokens = _tokens(token_ids)
    grains = len(tokens) // grain_tokens
    images = _images_by_grain(spans, grains, grain_tokens)
    size = _HEAD.size + 4 * grain_tokens
    rows = np.zeros((grains, size), dtype=np.uint8)
    rows[:, _HEAD.size :] = tokens[: grains * grain_tokens].reshape(grains, grain_tokens).view(np.uint8)
    rows[:, : _HEAD.size] = np.frombuffer(_HEAD.pack(_GRAIN_TAG, bytes(16), grain_tokens, 0), dtype=np.uint8)
    flat = rows.reshape(-1).data
    keys = []
    for grain in range(grains):
        at = grain * size
        flat[at + 8 : at + 24] = parent
        row: bytes | memoryview = flat[at : at + size]
        if grain in images:
            flat[at + 28 : at + 32] = struct.pack("<I", len(images[grain]))
            row = b"".join((row, *images[grain]))
        parent = sha256(row).digest()[:KEY_BYTES]
        keys.append(parent)
    return tuple(keys)


def _images_by_grain(spans: Sequence[Span], grains: int, grain_tokens: int) -> dict[int, list[bytes]]:
    """Encoded image fields of every grain that an image intersects, in prompt order."""
    found: dict[int, list[bytes]] = {}
    for span in sorted(spans, key=lambda s: s.start):
        if span.length < 1 or not span.digest:
            raise ObjectError(
                f"image span at {span.start}: length {span.length} and digest {span.digest!r} must not be empty"
            )
        first, last = max(0, span.start // grain_tokens), (span.start + span.length - 1) // grain_tokens
        for grain in range(first, min(last, grains - 1) + 1):
            start = span.start - grain * grain_tokens
            shape = (span.length, span.grid_rows, span.grid_columns, len(span.digest))
            found.setdefault(grain, []).append(_IMAGE.pack(_IMAGE_TAG, start, *shape) + span.digest)
    return found


def _tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """Little-endian uint32 [tokens], contiguous."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise ObjectError(f"token_ids: {token_ids.dtype} {token_ids.shape} must be one row of integers")
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**32:
            raise ObjectError(f"token_ids: {token_ids.min()} to {token_ids.max()} must lie in 0 to 2^32 - 1")
        return np.ascontiguousarray(token_ids, dtype="<u4")
    try:
        packed = array("I", token_ids)  # three times as fast as numpy on a tuple
    except (OverflowError, TypeError) as error:
        raise ObjectError(f"token_ids must be integers from 0 to 2^32 - 1: {error}") from error
    return np.frombuffer(packed, dtype=np.uint32).astype("<u4", copy=False)


def _prefixed(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
