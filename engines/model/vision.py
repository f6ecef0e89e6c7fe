"""Vision tower and aligner: patches of one image to the rows that replace its placeholders.

Source: official vision.py. Each image is encoded alone, with full attention inside it. In bfloat16 every product is
summed in float64 and then rounded, as in the trunk: two engines give the same bits for the same image, whatever their
number of threads.
"""

from collections.abc import Mapping

import torch
from shoal.engines.model.config import ModelConfig, VisionConfig
from shoal.engines.model.errors import ImageError
from torch import Tensor
from torch.nn import functional

NORM_EPS = 1e-6


class VisionEncoder:
    """The tower, the aligner and the learned delimiter rows in one floating-point type.

    `weights` are the VISION part of a checkpoint (or more); float32 is the reference (N0), bfloat16 what serves.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self.config = config.vision
        self.dtype = dtype
        self._wide = torch.float32 if dtype is torch.float32 else torch.float64
        names = [n for n in weights if n.startswith(("vision.", "aligner.", "image_"))]
        self._weights = {name: weights[name].to(dtype) for name in names}

    def encode(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Rows of one image span, [rows * (columns + 1) + 2, hidden]: START, lines that end in NEWLINE, END.

        patches: [grid rows * grid columns, 3 * patch * patch] or [.., 3, patch, patch]; raises ImageError.
        """
        features = self.align(self.tower(patches, grid), grid)
        rows, columns = token_grid(grid, self.config)
        newline = self._weights["image_newline"].expand(rows, 1, -1)
        lines = torch.cat((features.view(rows, columns, -1), newline), dim=1).flatten(0, 1)
        return torch.cat((self._weights["image_start"][None], lines, self._weights["image_end"][None]))

    def tower(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Vision transformer output [grid rows * grid columns, width] after its last norm; raises ImageError."""
        count = grid[0] * grid[1]
        if min(grid) < 1 or patches.shape[0] != count or patches[0].numel() != self.config.patch_channels:
            raise ImageError(
                f"patches {tuple(patches.shape)} do not fit grid {grid}: give [{count}, {self.config.patch_channels}]"
            )
        x = self._linear("vision.patch_embed.proj", patches.flatten(1).to(self.dtype))
        phase = rope_phase(grid, self.config).to(x.device)
        for index in range(self.config.num_hidden_layers):
            block = f"vision.blocks.{index}"
            x = x + self._attention(f"{block}.attn", self._norm(f"{block}.norm1", x), phase)
            x = x + self._mlp(f"{block}.mlp", self._norm(f"{block}.norm2", x))
        return self._norm("vision.norm", x)

    def align(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tower output to token rows [token rows * token columns, hidden]; the grid is zero-padded bottom and right."""
        ratio, (rows, columns) = self.config.downsample_ratio, token_grid(grid, self.config)
        square = features.view(*grid, -1)
        square = functional.pad(square, (0, 0, 0, columns * ratio - grid[1], 0, rows * ratio - grid[0]))
        # The unfolded order is channel first, then the position inside the cell.
        cells = square.view(rows, ratio, columns, ratio, -1).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return self._linear("aligner.w2", functional.gelu(self._linear("aligner.w1", cells)))

    def _attention(self, name: str, x: Tensor, phase: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        q, k, v = self._linear(f"{name}.wqkv", x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
        q, k = rotate(q, phase), rotate(k, phase)
        wide = self._wide
        scores = (q.to(wide) @ k.to(wide).transpose(1, 2)) * self.config.head_dim**-0.5
        out = (scores.softmax(dim=-1) @ v.to(wide)).to(self.dtype)
        return self._linear(f"{name}.wo", out.transpose(0, 1).flatten(1))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{name}.w1", x).chunk(2, dim=-1)
        return self._linear(f"{name}.w2", functional.silu(gate) * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        out = functional.linear(x.to(self._wide), weight.to(self._wide))
        return (out if bias is None else out + bias.to(self._wide)).to(self.dtype)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.to(self._wide)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (scaled * self._weights[f"{name}.weight"].to(self._wide)).to(self.dtype)


def token_grid(grid: tuple[int, int], vision: VisionConfig) -> tuple[int, int]:
    """Token rows and columns of a patch grid."""
    ratio = vision.downsample_ratio
    return -(-grid[0] // ratio), -(-grid[1] // ratio)


def rope_phase(grid: tuple[int, int], vision: VisionConfig) -> Tensor:
    """Angle of each patch and rotated pair, float32 [patches, head_dim / 2]: row angles, then column angles."""
    quarter = vision.head_dim // 4
    steps = torch.arange(quarter, dtype=torch.float32) * 2 / (vision.head_dim // 2)
    frequency = 1.0 / vision.rope_theta**steps
    rows = torch.arange(grid[0], dtype=torch.float32)[:, None].expand(grid).flatten()
    columns = torch.arange(grid[1], dtype=torch.float32)[None].expand(grid).flatten()
    return torch.cat((torch.outer(rows, frequency), torch.outer(columns, frequency)), dim=1)


def rotate(x: Tensor, phase: Tensor) -> Tensor:
    """Rotate [heads, patches, head_dim] by `phase`: channel i pairs with channel i + head_dim / 2."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = phase.cos(), phase.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
