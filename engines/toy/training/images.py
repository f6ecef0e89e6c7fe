"""Vision tower and aligner for training: the pictures of a whole batch at once, padded to the largest."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.vision import NORM_EPS
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Pictures:
    """All pictures of a batch.

    patches uint8 [n, P, 3 x patch x patch], zero past a picture's own; counts int64 [n]; places int64 [n, P, 2]: row
    and column of each patch; cells int64 [C, r x r]: patches (flat over n x P, n x P = none) that make one IMAGE
    token; positions int64 [M]: flat places of span tokens in the batch's rows; sources int64 [M]: what each shows, a
    cell's number or C + 0, 1, 2 for START, NEWLINE, END.
    """

    patches: Tensor
    counts: Tensor
    places: Tensor
    cells: Tensor
    positions: Tensor
    sources: Tensor


def image_rows(weights: Mapping[str, Tensor], pictures: Pictures, config: ModelConfig) -> Tensor:
    """Embedding rows [M, H] of every span token."""
    vision = config.vision
    x = pictures.patches.to(torch.bfloat16).sub(127.5).div(127.5)
    x = _linear(weights, "vision.patch_embed.proj", x)
    angles = _angles(pictures.places, vision.head_dim, vision.rope_theta)
    own = torch.arange(x.shape[1], device=x.device)[None] < pictures.counts[:, None]
    for index in range(vision.num_hidden_layers):
        block = f"vision.blocks.{index}"
        qkv = _linear(weights, f"{block}.attn.wqkv", _norm(x, weights[f"{block}.norm1.weight"]))
        q, k, v = qkv.unflatten(-1, (3, vision.num_attention_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = own[:, None, None]
        out = functional.scaled_dot_product_attention(_turn(q, angles), _turn(k, angles), v, attn_mask=mask)
        x = x + _linear(weights, f"{block}.attn.wo", out.transpose(1, 2).flatten(2))
        gate, up = _linear(weights, f"{block}.mlp.w1", _norm(x, weights[f"{block}.norm2.weight"])).chunk(2, dim=-1)
        x = x + _linear(weights, f"{block}.mlp.w2", functional.silu(gate) * up)
    flat = _norm(x, weights["vision.norm.weight"]).flatten(0, 1)
    flat = torch.cat((flat, flat.new_zeros(1, flat.shape[1])))
    # The aligner's input is channel first, then the place inside the cell.
    cells = flat[pictures.cells].transpose(1, 2).flatten(1)
    cells = _linear(weights, "aligner.w2", functional.gelu(_linear(weights, "aligner.w1", cells)))
    marks = torch.stack([weights[name] for name in ("image_start", "image_newline", "image_end")])
    return torch.cat((cells, marks))[pictures.sources]


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * weight.float()).to(x.dtype)


def _angles(places: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angles [n, 1, P, head_dim / 2]: of the row, then of the column."""
    steps = torch.arange(head_dim // 4, device=places.device, dtype=torch.float32) * 2 / (head_dim // 2)
    frequency = 1.0 / theta**steps
    return (places.float().unsqueeze(-1) * frequency).flatten(2).unsqueeze(1)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
