"""Mixture of experts for training: every expert computes every row, weights of those not chosen are zero.

At this size the dense products are cheaper on a GPU than sorting rows by expert, and the sum is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.moe import WEIGHT_EPS
from shoal.engines.toy.training import fused
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that chose each expert, [experts], of text and of images."""

    text: Tensor
    image: Tensor


def run_experts(
    weights: Mapping[str, Tensor], name: str, x: Tensor, image_mask: Tensor, config: ModelConfig, top: int
) -> tuple[Tensor, Load]:
    """The expert sublayer's output [N, H] and how often each expert was chosen."""
    by, load = route(weights, name, x, image_mask, top, config.text.routed_scaling_factor)
    experts = by.shape[1]
    by = torch.cat((by, by.new_ones(len(by), 1)), dim=1)

    def joined(part: str) -> Tensor:
        shared = weights[f"{name}.shared_experts.{part}.weight"].unsqueeze(0)
        return torch.cat((weights[f"{name}.experts.{part}"], shared))

    gate = functional.linear(x, joined("w1").flatten(0, 1)).unflatten(1, (experts + 1, -1))
    up = functional.linear(x, joined("w3").flatten(0, 1)).unflatten(1, (experts + 1, -1))
    inner = fused.weighted_swiglu(gate, up, by, config.text.swiglu_limit)
    down = joined("w2").transpose(0, 1).flatten(1)
    return functional.linear(inner.flatten(1), down), load


def route(
    weights: Mapping[str, Tensor], name: str, x: Tensor, image_mask: Tensor, top: int, scale: float
) -> tuple[Tensor, Load]:
    """Weights [N, experts], zero where not chosen: the biased score chooses, the unbiased one weighs."""
    scores = functional.softplus(functional.linear(x.float(), weights[f"{name}.gate.weight"].float())).sqrt()
    with torch.no_grad():
        bias = torch.where(image_mask.unsqueeze(1), weights[f"{name}.gate.bias_vl"], weights[f"{name}.gate.bias"])
        chosen = torch.zeros_like(scores).scatter_(1, (scores + bias).topk(top, dim=-1).indices, 1.0)
        image = image_mask.unsqueeze(1)
        load = Load((chosen * ~image).sum(0), (chosen * image).sum(0))
    kept = scores * chosen
    return kept / (kept.sum(-1, keepdim=True) + WEIGHT_EPS) * scale, load
