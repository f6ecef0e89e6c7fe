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
    scores = torch.nn.functional.softplus(product(x, weights.router)).sqrt()
    keys = scores + torch.where(image_mask.unsqueeze(-1), weights.bias_image, weights.bias)
    choice = keys.sort(dim=-1, descending=True, stable=True).indices[:, : rules.top]
    chosen = scores.gather(-1, choice)
    return Routing(choice, chosen / (chosen.sum(-1, keepdim=True) + WEIGHT_EPS) * rules.scale)


def run_expert(numerics: Numerics, x: Tensor, expert: Expert, limit: float, weight: Tensor | None) -> Tensor:
    """One expert's output [n, H] for rows [n, H]; `weight` [n, 1] is the routing weight, None for the shared expert."""
    gate, up = numerics.linear(x, expert.gate_up).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate.clamp_(max=limit)).mul_(up.clamp_(-limit, limit))
    if weight is not None:
        inner.mul_(weight)
    return numerics.linear(numerics.round_(inner), expert.down)


def run_moe(numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float) -> Tensor:
    """Routed and shared experts' sum for rows [T, H], rounded once."""
    total = run_expert(numerics, x, weights.shared, limit, None)
    # Experts run in ascending order, so each row adds its parts in the same order in every batch.
    flat = routing.choice.flatten()
    order = torch.argsort(flat, stable=True)
    rows = order.div(routing.choice.shape[1], rounding_mode="floor")
    inputs, scale = x[rows], routing.weights.flatten()[order].unsqueeze(-1)
    counts, first = torch.bincount(flat, minlength=len(weights.experts)).tolist(), 0
    for expert, count in zip(weights.experts, counts, strict=True):
        if count:
            part = slice(first, first + count)
            first += count
            total.index_add_(0, rows[part], run_expert(numerics, inputs[part], expert, limit, scale[part]))
    return numerics.round_(total)
