"""What a run leaves behind: its whole state to go on from, and the checkpoint that is served."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.names import TensorSpec, float_specs
from shoal.engines.model.quant import dequantise_fp8, dequantise_fp8_blocks, dequantise_mxfp4
from shoal.engines.model.save import quantised, save_checkpoint
from shoal.engines.model.weights import load_model_weights
from shoal.engines.toy.tokenizer import TOKENIZER_FILE
from shoal.engines.toy.training.initial import initial_weights
from shoal.engines.toy.training.stacks import Stacks
from torch import Tensor

STATE = "state.pt"
SHARD_BYTES = 15 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands: index of the stage and steps done of it."""

    stage: int = 0
    step: int = 0


def save_state(directory: Path, stacks: Stacks, optimiser: dict[str, dict[str, Tensor]], place: Place) -> None:
    """Masters, optimiser and place, in one file that replaces the last one whole."""
    directory.mkdir(parents=True, exist_ok=True)
    masters = {name: parameter.detach() for name, parameter in stacks.parameters.items()}
    aside = directory / f".{STATE}"
    torch.save({"masters": masters, "optimiser": optimiser, "place": (place.stage, place.step)}, aside)
    aside.rename(directory / STATE)


def load_state(directory: Path, stacks: Stacks, device: torch.device) -> tuple[dict[str, dict[str, Tensor]], Place]:
    """Read a state into the stacks; the optimiser's part and the place. Raises OSError."""
    saved = torch.load(directory / STATE, map_location=device, weights_only=True)
    with torch.no_grad():
        for name, parameter in stacks.parameters.items():
            parameter.copy_(saved["masters"][name])
    return saved["optimiser"], Place(*saved["place"])


def export(directory: Path, config: ModelConfig, floats: Mapping[str, Tensor]) -> None:
    """Write the served checkpoint: published layout and formats, with the toy's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(directory, config, quantised(config, floats), SHARD_BYTES)
    (directory / TOKENIZER_FILE.name).write_bytes(TOKENIZER_FILE.read_bytes())


def start(config: ModelConfig, seed: int, checkpoint: Path | None) -> dict[str, Tensor]:
    """Float32 weights to begin with: drawn, or read back from a served checkpoint (trained weights lose nothing that
    the service would have seen)."""
    if checkpoint is None:
        return initial_weights(config, seed)
    tensors = load_model_weights(checkpoint, config)
    return {name: _float(spec, tensors, config.quantization.block) for name, spec in float_specs(config).items()}


def _float(spec: TensorSpec, tensors: Mapping[str, Tensor], block: int) -> Tensor:
    name = spec.name
    value, scale = tensors[name], tensors.get(f"{name.removesuffix('.weight')}.scale")
    if scale is None:
        return value.float()
    if spec.dtype == "I8":
        return dequantise_mxfp4(value.view(torch.uint8), scale)
    if name.endswith("engram.embed.weight"):
        return dequantise_fp8(value.view(torch.uint8), scale)
    return dequantise_fp8_blocks(value, scale, block)
