"""Mixture of experts: the square-root-softplus router, clamped SwiGLU experts and the shared expert.

Source: published model.py (Gate, Expert, MoE): the bias selects, the unbiased score weighs, and the weight
multiplies before the down projection.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model.numerics import Linear, Numerics, product
from torch import Tensor

WEIGHT_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Expert:
    """One SwiGLU expert: gate and up [inner, H], down [H, inner]."""

    gate: Linear
    up: Linear
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
    scores = torch.nn.functional.softplus(product(x, weights.router)).sqrt()
    keys = scores + torch.where(image_mask.unsqueeze(-1), weights.bias_image, weights.bias)
    choice = keys.sort(dim=-1, descending=True, stable=True).indices[:, : rules.top]
    chosen = scores.gather(-1, choice)
    if rules.top > 1:  # the published Gate leaves a single expert's score as it is: normalised, it would say nothing
        chosen = chosen / (chosen.sum(-1, keepdim=True) + WEIGHT_EPS)
    return Routing(choice, chosen * rules.scale)


def run_expert(numerics: Numerics, x: Tensor, expert: Expert, limit: float, weight: Tensor | None) -> Tensor:
    """One expert's output [n, H] for rows [n, H]; `weight` [n] is the routing weight, None for the shared expert."""
    gate = numerics.linear(x, expert.gate).clamp(max=limit)
    up = numerics.linear(x, expert.up).clamp(-limit, limit)
    inner = torch.nn.functional.silu(gate) * up
    if weight is not None:
        inner = inner * weight.unsqueeze(-1)
    return numerics.linear(numerics.round(inner), expert.down)


def run_moe(numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float) -> Tensor:
    """Routed and shared experts' sum for rows [T, H], rounded once."""
    total = run_expert(numerics, x, weights.shared, limit, None)
    used, order = torch.sort(routing.choice.flatten(), stable=True)
    ids, counts = torch.unique_consecutive(used, return_counts=True)
    pieces = order.split(counts.tolist())
    # Experts run in ascending order, so each row adds its parts in the same order in every batch.
    for expert_id, places in zip(ids.tolist(), pieces, strict=True):
        rows = places.div(routing.choice.shape[1], rounding_mode="floor")
        weight = routing.weights.flatten()[places]
        total.index_add_(0, rows, run_expert(numerics, x[rows], weights.experts[expert_id], limit, weight))
    return numerics.round(total)
