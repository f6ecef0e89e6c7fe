"""Writing a checkpoint in the published layout: quantised weights, shards by size, index and configuration."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import WeightsError
from shoal.engines.model.names import TensorSpec, tensor_specs
from shoal.engines.model.quant import (
    FP8_AMAX_MIN,
    FP8_MAX,
    power_of_two_ceiling,
    quantise_fp8,
    quantise_mxfp4,
    ue8m0_to_float,
)
from shoal.engines.model.weights import INDEX, SINGLE
from torch import Tensor

SHARD_BYTES = 8 << 30
STORED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def quantise_fp8_blocks(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """FP8 bytes `[out, in]` and UE8M0 bytes of each `block` x `block` square of a float weight (published format)."""
    rows, columns = weight.shape
    down, across = -(-rows // block), -(-columns // block)
    padded = torch.zeros(down * block, across * block, dtype=torch.float32)
    padded[:rows, :columns] = weight
    squares = padded.view(down, block, across, block)
    scales = power_of_two_ceiling(squares.abs().amax(dim=(1, 3)).clamp_min(FP8_AMAX_MIN) / FP8_MAX)
    scaled = (squares / ue8m0_to_float(scales)[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    data = scaled.view(down * block, across * block)[:rows, :columns].to(torch.float8_e4m3fn)
    return data.view(torch.uint8), scales


def quantised(config: ModelConfig, floats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of float weights: `floats` has every name of the checkpoint except the scales.

    Dense weights become FP8 blocks, routed experts MXFP4, Engram tables FP8 rows; the rest is cast.
    """
    stored: dict[str, Tensor] = {}
    for name, spec in tensor_specs(config).items():
        if spec.dtype == "F8_E8M0":
            continue
        value = floats[name]
        scale = f"{name.removesuffix('.weight')}.scale"
        if spec.dtype == "I8":
            stored[name], stored[scale] = quantise_mxfp4(value)
        elif name.endswith("engram.embed.weight"):
            stored[name], stored[scale] = quantise_fp8(value)
        elif spec.dtype == "F8_E4M3":
            stored[name], stored[scale] = quantise_fp8_blocks(value, config.quantization.block)
        else:
            stored[name] = value.to(STORED[spec.dtype])
    return stored


def save_checkpoint(
    directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json and the tensors (as `load_model_weights` returns them) into the existing `directory`.

    Shards hold at most `shard_bytes` (a larger tensor has its own); every Engram table has its own shards, so that
    it can be memory-mapped alone. One shard makes one file without an index. Raises WeightsError.
    """
    specs = tensor_specs(config)
    wrong = [n for n in specs if n not in tensors] + [n for n in tensors if n not in specs]
    wrong += [n for n, s in specs.items() if n in tensors and tuple(tensors[n].shape) != s.shape]
    if wrong:
        raise WeightsError(f"cannot save: missing, unexpected or mis-shaped tensors {wrong[:20]}; save a whole model")
    shards = plan_shards(specs, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        save_file(
            {name: _stored(tensors[name], specs[name]) for name in names}, directory / file, metadata={"format": "pt"}
        )
        (directory / file).chmod(0o644)  # safetensors leaves files that only their owner may read
    if len(shards) > 1:
        total = sum(_bytes(spec) for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n", encoding="utf-8")


def plan_shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """The names of each shard, in checkpoint order; Engram tables come last, each in shards of its own."""
    small = sum(_bytes(spec) for spec in specs.values()) <= shard_bytes
    tables: dict[str, list[str]] = {}
    for name in specs:
        table = name.rpartition(".")[0] if ".engram.embed." in name and not small else ""
        tables.setdefault(table, []).append(name)
    shards: list[list[str]] = []
    for _, names in sorted(tables.items(), key=lambda item: item[0] != ""):
        filled = shard_bytes + 1
        for name in names:
            filled += _bytes(specs[name])
            if filled > shard_bytes:
                shards.append([])
                filled = _bytes(specs[name])
            shards[-1].append(name)
    return shards


def _bytes(spec: TensorSpec) -> int:
    count = STORED[spec.dtype].itemsize
    for size in spec.shape:
        count *= size
    return count


def _stored(tensor: Tensor, spec: TensorSpec) -> Tensor:
    dtype = STORED[spec.dtype]
    if tensor.dtype == dtype:
        return tensor.contiguous()
    if tensor.dtype == torch.uint8 and dtype.itemsize == 1:
        return tensor.contiguous().view(dtype)  # bytes are reinterpreted: a cast would destroy them
    raise WeightsError(f"cannot save {spec.name}: it is {tensor.dtype}, its stored type is {spec.dtype}; quantise it")
