"""The real checksums: CRC32C by google-crc32c and 128-bit xxh3, both on buffers without a copy."""

import google_crc32c
import numpy as np
import xxhash
from shoal.kvstore.core.stripe import Buffer, Checksums


def crc32c(buffer: Buffer) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer, 32 bits; about 30 GB/s."""
    return int(google_crc32c.value(np.frombuffer(buffer, dtype=np.uint8)))


def digest128(prefix: bytes, buffer: Buffer) -> bytes:
    """xxh3_128 of length-prefixed `prefix` and `buffer`, 16 bytes; not cryptographic, which the chain key is."""
    state = xxhash.xxh3_128(len(prefix).to_bytes(4, "little") + prefix)
    state.update(buffer.data if isinstance(buffer, np.ndarray) else buffer)
    return bytes(state.digest())


def checksums() -> Checksums:
    """Both functions as the value that the core takes."""
    return Checksums(crc32c, digest128)
