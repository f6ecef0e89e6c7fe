"""Checkpoint tensors, read lazily from safetensors files and checked against the configuration before use."""

import json
import struct
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import WeightsError
from shoal.engines.model.names import ALL, Part, TensorSpec, tensor_specs
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# More problems than this are counted, not listed.
PROBLEMS_SHOWN = 20
# safetensors refuses longer headers; a longer length means that the file is something else.
HEADER_BYTES_MAX = 100_000_000


class Weights(Mapping[str, Tensor]):
    """Tensors of some parts of a checkpoint, memory-mapped: bytes are read when they are touched.

    Values are as stored: BF16, F32 and FP8 (float8_e4m3fn); UE8M0 scales as their exponent bytes (uint8, value
    2^(byte-127)); MXFP4 weights as bytes of two codes (uint8, low nibble first). Treat them as read-only: they
    share the file's pages.
    """

    def __init__(self, files: Mapping[str, Path], specs: Mapping[str, TensorSpec]) -> None:
        self._files = files
        self._specs = specs
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        return _bytes_as_stored(self._handle(name).get_tensor(name), spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name starts with `prefix`, by the rest of their name (`layers.3.`, `mtp.0.`)."""
        return {name.removeprefix(prefix): self[name] for name in self._specs if name.startswith(prefix)}

    def _handle(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]


def load_model_weights(directory: Path, config: ModelConfig, parts: Set[Part | str] = ALL) -> Weights:
    """The tensors of `parts` in the checkpoint at `directory`.

    All names of the checkpoint are checked against `config`; shapes and types are checked for the loaded parts,
    whose files alone are opened. Raises WeightsError listing what is missing, unexpected, mis-shaped or mis-typed.
    """
    specs = tensor_specs(config)
    chosen = frozenset(Part(p) for p in parts)
    wanted = {name: spec for name, spec in specs.items() if spec.part in chosen}
    files = _files_by_name(Path(directory))
    problems = [f"missing {name}" for name in specs if name not in files]
    problems += [f"unexpected {name}" for name in files if name not in specs]
    headers = {path: read_header(path) for path in sorted({files[n] for n in wanted if n in files})}
    for name, spec in wanted.items():
        if name in files:
            problems += _mismatch(spec, headers[files[name]], files[name])
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        shown = problems[:PROBLEMS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise WeightsError(
            f"{directory}: {len(problems)} tensors do not match config.json; use the files of one checkpoint:\n  "
            + "\n  ".join(shown)
        )
    return Weights({name: files[name] for name in wanted}, wanted)


def read_header(path: Path) -> dict[str, Any]:
    """The tensor table of one safetensors file, checked against the file's size; raises WeightsError."""
    try:
        with path.open("rb") as file:
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else HEADER_BYTES_MAX + 1
            if length > HEADER_BYTES_MAX:
                raise WeightsError(f"{path}: is not a safetensors file; download it again")
            header: dict[str, Any] = json.loads(file.read(length))
            size = file.seek(0, 2)
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path}: cannot be read ({error}); download it again") from error
    header.pop("__metadata__", None)
    needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if needed != size:
        raise WeightsError(f"{path}: has {size} bytes, its header describes {needed}; download it again")
    return header


def _files_by_name(directory: Path) -> dict[str, Path]:
    index, single = directory / INDEX, directory / SINGLE
    if index.exists():
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: directory / shard for name, shard in table.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: cannot be read ({error!r}); download it again") from error
    if single.exists():
        return dict.fromkeys(read_header(single), single)
    raise WeightsError(f"{directory}: has neither {INDEX} nor {SINGLE}; give a checkpoint directory")


def _mismatch(spec: TensorSpec, header: Mapping[str, Any], path: Path) -> list[str]:
    entry = header.get(spec.name)
    if entry is None:
        return [f"missing {spec.name} in {path.name}, where the index places it"]
    problems = []
    if tuple(entry["shape"]) != spec.shape:
        problems.append(f"{spec.name} has shape {entry['shape']}, needs {list(spec.shape)}")
    if entry["dtype"] != spec.dtype:
        problems.append(f"{spec.name} has type {entry['dtype']}, needs {spec.dtype}")
    return problems


def _bytes_as_stored(tensor: Tensor, dtype: str) -> Tensor:
    # A numeric cast of exponent bytes or packed codes would destroy them; a view keeps the bytes.
    return tensor.view(torch.uint8) if dtype in ("F8_E8M0", "I8") else tensor
