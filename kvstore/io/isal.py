"""Reed-Solomon by ISA-L through ctypes: zero copy on numpy buffers, interpreter lock released while it works.

The library is a system libisal or the one inside the pyeclib wheel. Matrix: ISA-L's Cauchy construction
(`gf_gen_cauchy1_matrix`), field polynomial 0x11d. Tables are cached per shape and per loss pattern.
"""

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from shoal.kvstore.core.stripe import Bytes
from shoal.kvstore.errors import CodeLibraryError

CODE_NAME = "isal-cauchy"
_SYMBOLS = ("gf_gen_cauchy1_matrix", "gf_invert_matrix", "ec_init_tables", "ec_encode_data", "crc32_iscsi")
_Tables = ctypes.Array[ctypes.c_ubyte]
_Pointers = ctypes.Array[ctypes.c_void_p]
_TABLE_BYTES = 32  # per matrix element, ISA-L erasure_code.h


def library_candidates() -> tuple[str, ...]:
    """Where ISA-L may be, best first: the system's libisal, then the pyeclib wheel's private copy."""
    system = ctypes.util.find_library("isal")
    found = [system] if system else []
    spec = importlib.util.find_spec("pyeclib")
    if spec is not None and spec.origin is not None:
        beside = Path(spec.origin).parent.parent / "pyeclib.libs"
        found += [str(path) for path in sorted(beside.glob("libisal*.so*"))]
    return tuple(found)


def load_library(candidates: Sequence[str] | None = None) -> ctypes.CDLL:
    """The first candidate that loads and has ISA-L's symbols; raises CodeLibraryError naming both remedies."""
    tried = []
    for path in library_candidates() if candidates is None else candidates:
        try:
            library = ctypes.CDLL(path)
            for symbol in _SYMBOLS:
                getattr(library, symbol)
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
            continue
        return library
    raise CodeLibraryError(
        f"no ISA-L erasure-code library: tried {tried or 'nothing, none found'}; "
        "install the system package (Debian: apt install libisal2) or `pip install pyeclib`, whose wheel carries it"
    )


class IsalCode:
    """The erasure code that stripes use; thread-safe, one instance a process is enough."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = library or load_library()
        self._encode_tables = lru_cache(maxsize=16)(self._make_encode_tables)
        # 10+2 has 12 + 66 loss patterns; other shapes share what room is left.
        self._rebuild_tables = lru_cache(maxsize=1024)(self._make_rebuild_tables)

    @property
    def name(self) -> str:
        """Code and matrix as fragment heads record them."""
        return CODE_NAME

    def encode(self, data: Bytes, parity: Bytes) -> None:
        """Fill parity uint8 [m, shard bytes] from data uint8 [k, shard bytes], both C-contiguous."""
        (rows, length), (outputs, other) = data.shape, parity.shape
        assert other == length, f"parity rows of {other} bytes for shards of {length}"
        self._multiply(self._encode_tables(rows, outputs), _row_pointers(data), _row_pointers(parity), length)

    def rebuild(self, shards: Mapping[int, Bytes], lost: Mapping[int, Bytes], parity: int) -> None:
        """Fill the rows of the lost data shards from exactly k shards, both by index; all rows contiguous."""
        have = tuple(sorted(shards))
        lengths = {len(row) for row in (*shards.values(), *lost.values())}
        assert len(lengths) == 1, f"shards of different lengths: {sorted(lengths)}"
        tables = self._rebuild_tables(have, tuple(lost), len(have), parity)
        sources = (ctypes.c_void_p * len(have))(*[_address(shards[index]) for index in have])
        targets = (ctypes.c_void_p * len(lost))(*[_address(row) for row in lost.values()])
        self._multiply(tables, sources, targets, lengths.pop())

    def matrix(self, data: int, parity: int) -> Bytes:
        """uint8 [k + m, k]: identity over the Cauchy rows."""
        matrix = np.zeros((data + parity, data), dtype=np.uint8)
        self._library.gf_gen_cauchy1_matrix(_pointer(matrix), data + parity, data)
        return matrix

    def bare_call(self, sources: Sequence[Bytes], out: Bytes, rows: Bytes) -> Callable[[], None]:
        """One `ec_encode_data` with everything prepared: what the code is measured against."""
        tables = self._tables(rows)
        inputs = (ctypes.c_void_p * len(sources))(*(row.ctypes.data for row in sources))
        outputs = (ctypes.c_void_p * len(out))(*(row.ctypes.data for row in out))
        arguments = (len(sources[0]), len(sources), len(out), tables, inputs, outputs)

        def call(keep: tuple[object, ...] = (sources, out, tables)) -> None:
            self._library.ec_encode_data(*arguments)

        return call

    def _multiply(self, tables: _Tables, inputs: _Pointers, outputs: _Pointers, length: int) -> None:
        self._library.ec_encode_data(length, len(inputs), len(outputs), tables, inputs, outputs)

    def _make_encode_tables(self, data: int, parity: int) -> _Tables:
        return self._tables(self.matrix(data, parity)[data:])

    def _make_rebuild_tables(self, have: tuple[int, ...], lost: tuple[int, ...], data: int, parity: int) -> _Tables:
        chosen = np.ascontiguousarray(self.matrix(data, parity)[list(have)])
        inverse = np.empty((data, data), dtype=np.uint8)
        failed = self._library.gf_invert_matrix(_pointer(chosen), _pointer(inverse), data)
        assert failed == 0, f"every {data} rows of a Cauchy matrix are independent, yet {have} are not"
        return self._tables(np.ascontiguousarray(inverse[list(lost)]))

    def _tables(self, rows: Bytes) -> _Tables:
        outputs, inputs = rows.shape
        tables = (ctypes.c_ubyte * (max(1, rows.size) * _TABLE_BYTES))()
        contiguous = np.ascontiguousarray(rows)
        self._library.ec_init_tables(inputs, outputs, _pointer(contiguous), tables)
        return tables


def _pointer(array: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _row_pointers(rows: Bytes) -> _Pointers:
    """Address of each row of a C-contiguous matrix."""
    assert rows.flags.c_contiguous, "rows must be contiguous"
    return _pointers(_address(rows), rows.shape[1], len(rows))


@lru_cache(maxsize=1024)
def _pointers(first: int, stride: int, count: int) -> _Pointers:
    """Addresses as C wants them; buffers are used again, so the same ones are often asked for."""
    return (ctypes.c_void_p * count)(*(first + stride * index for index in range(count)))


def _address(row: Bytes) -> int:
    """Where an array's bytes begin. Each way is several times as fast as the next: `row.ctypes.data` is the last."""
    if row.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(row.data))
    return int(row.__array_interface__["data"][0])
