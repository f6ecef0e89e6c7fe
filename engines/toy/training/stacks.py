"""Float32 master weights, stacked over layers and experts, and the weights that a step computes with."""

import re
from collections.abc import Iterable, Mapping

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.names import float_specs
from shoal.engines.toy.training.fake_quant import fp8_blocks, fp8_rows, mxfp4_rows
from torch import Tensor, nn

NUMBER = re.compile(r"\.\d+\.")


def pattern_of(name: str) -> str:
    """The stack that a tensor belongs to: its name with layer and expert numbers left out.

    Engram tables stay alone: their numbers of rows differ.
    """
    return name if ".engram.embed." in name else NUMBER.sub(".*.", name)


class Stacks:
    """Master weights of a whole model: pattern -> float32 parameter [members, ...], and the names of its members."""

    def __init__(self, config: ModelConfig, floats: Mapping[str, Tensor], device: torch.device) -> None:
        self.specs = float_specs(config)
        self.members: dict[str, list[str]] = {}
        for name in self.specs:
            self.members.setdefault(pattern_of(name), []).append(name)
        self.parameters: dict[str, nn.Parameter] = {}
        for pattern, names in self.members.items():
            stacked = torch.stack([floats[name].float() for name in names]).to(device)
            assert stacked.shape[1:] == self.specs[names[0]].shape, f"{pattern}: {stacked.shape}"
            self.parameters[pattern] = nn.Parameter(stacked)

    def floats(self) -> dict[str, Tensor]:
        """Float32 weights by checkpoint name, on the CPU."""
        return {
            name: value
            for pattern, names in self.members.items()
            for name, value in zip(names, self.parameters[pattern].detach().cpu(), strict=True)
        }

    def require_grad(self, patterns: Iterable[str]) -> None:
        """Train exactly these stacks."""
        wanted = set(patterns)
        for pattern, parameter in self.parameters.items():
            parameter.requires_grad_(pattern in wanted)

    def step_weights(self) -> dict[str, Tensor]:
        """Weights by name as the served model holds them: rounded to their format, BF16 unless stored as F32.

        Experts of one layer come as one tensor [experts, out, in] under `….experts.w1` (w2, w3).
        """
        weights: dict[str, Tensor] = {}
        for pattern, names in self.members.items():
            rounded = _rounded(pattern, self.specs[names[0]].dtype, self.parameters[pattern])
            if ".experts.*." not in pattern:
                weights.update(zip(names, rounded.unbind(0), strict=True))
                continue
            prefixes = list(dict.fromkeys(n.partition(".experts.")[0] for n in names))
            by_layer = rounded.unflatten(0, (len(prefixes), -1)).unbind(0)
            suffix = names[0].split(".")[-2]
            # Names list one expert of a layer after another; `names.py` lists w1 of all experts, then w2, then w3.
            weights.update({f"{p}.experts.{suffix}": w for p, w in zip(prefixes, by_layer, strict=True)})
        return weights


def _rounded(pattern: str, dtype: str, stack: Tensor) -> Tensor:
    if pattern.endswith("engram.embed.weight"):
        return fp8_rows(stack).bfloat16()
    if dtype == "F8_E4M3":
        return fp8_blocks(stack).bfloat16()
    if dtype == "I8":
        return mxfp4_rows(stack).bfloat16()
    return stack.bfloat16() if dtype == "BF16" else stack
