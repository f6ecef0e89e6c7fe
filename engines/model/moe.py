"""Mixture of experts: the square-root-softplus router, clamped SwiGLU experts and the shared expert.

Source: published model.py (Gate, Expert, MoE): the bias selects, the unbiased score weighs, and the weight
multiplies before the down projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from shoal.engines.model.numerics import Linear, Numerics, product
from torch import Tensor

WEIGHT_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Expert:
    """One SwiGLU expert: gate and up as one layer [2 inner, H] (the gate's rows first), down [H, inner]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router [experts, H] with its two selection biases [experts] (text, image spans), experts and shared expert."""

    router: Tensor
    bias: Tensor
    bias_image: Tensor
    experts: tuple[Expert, ...]
    shared: Expert


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of T rows: choice int64 [T, top] and weights [T, top]."""

    choice: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class MoeRules:
    """The numbers of the configuration that the experts need."""

    top: int
    scale: float
    limit: float


def route(x: Tensor, weights: MoeWeights, image_mask: Tensor, rules: MoeRules) -> Routing:
    """The experts of rows [T, H]; image_mask: bool [T]. Ties go to the lower expert."""
    scores = torch.nn.functional.softplus(product(x, weights.router)).sqrt_()
    keys = scores + torch.where(image_mask.unsqueeze(-1), weights.bias_image, weights.bias)
    choice = keys.sort(dim=-1, descending=True, stable=True).indices[:, : rules.top]
    chosen = scores.gather(-1, choice)
    if rules.top > 1:  # the published Gate leaves a single expert's score as it is: normalised, it would say nothing
        chosen = chosen.div_(chosen.sum(-1, keepdim=True).add_(WEIGHT_EPS))
    return Routing(choice, chosen.mul_(rules.scale))


class ExpertsPort(Protocol):
    """Who computes the experts of the trunk's layers: this process, or the ranks of a group together."""

    def run(
        self, layer: int, numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float
    ) -> Tensor:
        """Routed and shared experts' sum for rows [T, H], rounded once, as `run_moe` gives it to the bit."""
        ...

    def join(self, numerics: Numerics, hidden: int) -> None:
        """Take part in one forward of the others without a row of one's own."""
        ...


class LocalExperts:
    """All experts are in this process."""

    def run(
        self, layer: int, numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float
    ) -> Tensor:
        """See ExpertsPort."""
        return run_moe(numerics, x, weights, routing, limit)

    def join(self, numerics: Numerics, hidden: int) -> None:
        """There are no others."""


ALL_HERE = LocalExperts()


def run_moe(numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float) -> Tensor:
    """Routed and shared experts' sum for rows [T, H], rounded once.

    A row and one of its experts make a pair. Pairs lie in ascending order of experts behind the shared expert's rows,
    so only products go expert by expert, everything else is done once, and each row adds its parts in the same order
    in every batch.
    """
    count = len(x)
    flat = routing.choice.flatten()
    order = torch.argsort(flat, stable=True)
    rows = order.div(routing.choice.shape[1], rounding_mode="floor")
    sizes = [count, *torch.bincount(flat, minlength=len(weights.experts)).tolist()]
    experts = (weights.shared, *weights.experts)
    parts = run_experts(numerics, torch.cat((x, x[rows])), experts, sizes, routing.weights.flatten()[order], limit)
    return numerics.round_(parts[:count].index_add_(0, rows, parts[count:]))


def run_experts(
    numerics: Numerics, x: Tensor, experts: Sequence[Expert], sizes: Sequence[int], weights: Tensor, limit: float
) -> Tensor:
    """Rounded outputs [pairs, H] of experts for `sizes` consecutive rows each of x [pairs, H], not summed.

    `weights` are of the last rows; rows before them (the shared expert's) have none.
    """
    both = _by_expert(numerics, x, [expert.gate_up for expert in experts], sizes)
    gate, up = both.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate.clamp_(max=limit)).mul_(up.clamp_(-limit, limit))
    inner[len(x) - len(weights) :].mul_(weights.unsqueeze(-1))
    return _by_expert(numerics, numerics.round_(inner), [expert.down for expert in experts], sizes)


def _by_expert(numerics: Numerics, x: Tensor, layers: Sequence[Linear], sizes: Sequence[int]) -> Tensor:
    """The rounded outputs [pairs, out] of each expert's layer for its `sizes` consecutive rows of x [pairs, in]."""
    parts, first = [], 0
    for layer, count in zip(layers, sizes, strict=True):
        if count:
            parts.append(numerics.linear_unrounded(x[first : first + count], layer))
        first += count
    return numerics.round_(torch.cat(parts))
