"""Muon for matrices, AdamW for everything else, over stacked parameters.

Muon (K. Jordan and others, 2024) orthogonalises the momentum of each matrix by Newton and Schulz's iteration; the
step is scaled to the size of an Adam step (Moonlight, 2025: 0.2 sqrt(max(rows, columns))), so both share a rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPS = 1e-8
STEP_SCALE = 0.2
MATRIX_ENDINGS = (
    "wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "wgate.weight", "w1.weight", "w2.weight",
    "w3.weight", "wk.weight", "wqkv.weight", "wo.weight", "main_proj.weight",
)  # fmt: skip


@dataclass(slots=True)
class Optimiser:
    """State and rules of one training run; `rates` multiplies the rate of single stacks."""

    parameters: Mapping[str, nn.Parameter]
    groups: int
    weight_decay: float = 0.05
    norm_max: float = 1.0
    rates: Mapping[str, float] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, rate: Tensor) -> Tensor:
        """Apply the gradients and forget them; the norm of all gradients.

        `rate`: a scalar tensor. The gradients of what AdamW trains are clipped to `norm_max` (a matrix's step has its
        own size). With a norm that is not finite every gradient counts as zero.
        """
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad and p.grad is not None}
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None])
        fine = torch.isfinite(norm)
        clip = torch.where(fine, (self.norm_max / (norm + 1e-6)).clamp(max=1.0), 0.0)
        for name, parameter in trained.items():
            assert parameter.grad is not None
            grad = torch.where(fine, parameter.grad, 0.0)
            self._apply(name, parameter, grad, (rate * self.rates.get(name, 1.0), clip))
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm

    def _apply(self, name: str, parameter: nn.Parameter, grad: Tensor, by: tuple[Tensor, Tensor]) -> None:
        (rate, clip), state = by, self.state.setdefault(name, {})
        if name.endswith(MATRIX_ENDINGS):
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(grad, 1 - MOMENTUM)
            parameter.mul_(1 - rate * self.weight_decay)
            parameter.sub_(self._direction(name, grad.lerp(momentum, MOMENTUM)) * rate)
            return
        count = state.setdefault("steps", torch.zeros((), device=parameter.device)).add_(1)
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        grad = grad * clip
        first.lerp_(grad, 1 - BETAS[0])
        second.lerp_(grad.square(), 1 - BETAS[1])
        scale = (second / (1 - BETAS[1] ** count)).sqrt_().add_(EPS)
        parameter.sub_(first / scale * (rate / (1 - BETAS[0] ** count)))

    def _direction(self, name: str, momentum: Tensor) -> Tensor:
        shape = momentum.shape
        if name.endswith("wo_a.weight"):  # each group is a matrix of its own
            momentum = momentum.unflatten(1, (self.groups, -1)).flatten(0, 1)
        scale = STEP_SCALE * max(momentum.shape[-2:]) ** 0.5
        return (orthogonal(momentum) * scale).view(shape)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with all singular values near one (between about 0.7 and 1.2)."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).float()
