"""Element-wise steps of the network, each compiled into one or two kernels on a GPU and run as they stand on a CPU."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch._dynamo
from shoal.engines.model.engram_write import DOT_MIN
from shoal.engines.model.mhc import RMS_EPS
from shoal.engines.toy.training.fake_quant import fp4_rows, fp8_rows, mxfp4_rows
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

SINKHORN_DETACHED = 17
"""Iterations that find the balancing factors without gradients; the three after them, 20 in all, carry it."""


RECOMPILE_LIMIT = 64
"""Shapes a function is compiled for; PyTorch's own limit is below what five stages need."""


COMPILED_ON = {"cuda"}
"""Device types whose tensors run the compiled functions. A CPU gains half its time too, after a minute of compiling."""


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled at its first call with tensors of a device in `COMPILED_ON`."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    compiled: Callable[P, R] = torch.compile(function)

    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(a for a in args if isinstance(a, Tensor))
        return compiled(*args, **kwargs) if first.device.type in COMPILED_ON else function(*args, **kwargs)

    return choose


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).bfloat16()


def _collapsed(streams: Tensor, pre: Tensor) -> Tensor:
    return (streams.float() * pre.unsqueeze(-1)).sum(1).bfloat16()


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, rounded to BF16."""
    return _normed(x, weight, eps)


@fused
def read_streams(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The normed input [N, H] that `pre` [N, m] collapses streams [N, m, H] to."""
    return _normed(_collapsed(streams, pre), weight, eps)


@fused
def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The rounded rows [N, H] that `pre` [N, m] collapses streams [N, m, H] to."""
    return _collapsed(streams, pre)


@fused
def inverse_rms(streams: Tensor) -> Tensor:
    """1 / RMS over all streams of a row, float32 [N, 1]."""
    return torch.rsqrt(streams.float().flatten(1).square().mean(-1, keepdim=True) + RMS_EPS)


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] + parts[1] + parts[2] + parts[3]


@fused
def mixing_weights(products: Tensor, inverse: Tensor, base: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, ...]:
    """pre [N, 4], post [N, 4] and doubly stochastic comb [N, 4, 4] of mHC products [N, 24].

    Sinkhorn's factors are found without gradients, then the last iterations carry the gradient: the result
    is the balanced matrix, and each of them projects the gradient onto what balancing leaves free.
    """
    mixes = products * inverse * torch.cat((scale[0].expand(4), scale[1].expand(4), scale[2].expand(16))) + base
    pre, post = torch.sigmoid(mixes[:, :4]) + eps, 2 * torch.sigmoid(mixes[:, 4:8])
    comb = torch.softmax(mixes[:, 8:].unflatten(-1, (4, 4)), dim=-1) + eps
    cells = [[comb[:, i, o] for o in range(4)] for i in range(4)]
    fixed = [[cell.detach() for cell in row] for row in cells]
    rows = [torch.ones_like(fixed[0][0]) for _ in range(4)]
    columns = rows
    for _ in range(SINKHORN_DETACHED):
        columns = [1 / (_sum([fixed[i][o] * rows[i] for i in range(4)]) + eps) for o in range(4)]
        rows = [1 / (_sum([fixed[i][o] * columns[o] for o in range(4)]) + eps) for i in range(4)]
    cells = [[cells[i][o] * (rows[i] * columns[o]).detach() for o in range(4)] for i in range(4)]
    for _ in range(2):
        by_column = [_sum([cells[i][o] for i in range(4)]) + eps for o in range(4)]
        cells = [[cells[i][o] / by_column[o] for o in range(4)] for i in range(4)]
        by_row = [_sum(cells[i]) + eps for i in range(4)]
        cells = [[cells[i][o] / by_row[i] for o in range(4)] for i in range(4)]
    by_column = [_sum([cells[i][o] for i in range(4)]) + eps for o in range(4)]
    flat = [cells[i][o] / by_column[o] for i in range(4) for o in range(4)]
    return pre, post, torch.stack(flat, dim=-1).unflatten(-1, (4, 4))


@fused
def write_streams(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [N, 4, H]: output [N, H] spread by post, old streams mixed over comb's first index, rounded."""
    old = [stream.float() for stream in streams.unbind(1)]
    out = output.float()
    new = [post[:, o, None] * out + sum(comb[:, i, o, None] * old[i] for i in range(4)) for o in range(4)]
    return torch.stack(new, dim=1).bfloat16()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    still, moved = x.float().split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    even, odd = moved.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((still, pairs.flatten(-2)), dim=-1).bfloat16()


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., n] with its last channel pairs turned; cos, sin [..., pairs] broadcast."""
    return _turned(x, cos, sin)


@fused
def window_rows(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Window KV [..., D] as its FP8 row reads back: normed, turned, rounded."""
    return fp8_rows(_turned(_normed(x, weight, eps), cos, sin))


@fused
def main_rows(latents: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compressed main KV [..., D] as its FP4 row reads back."""
    return fp4_rows(_turned(latents, cos, sin))


@fused
def index_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Index keys or queries [..., d] as their MXFP4 rows read back."""
    return mxfp4_rows(_turned(x, cos, sin))


@fused
def pool_pairs(both: Tensor) -> Tensor:
    """Latents [..., D] of groups [..., ratio, 2 D] of gate scores and values, rounded to BF16."""
    scores, values = both.float().chunk(2, dim=-1)
    return (torch.softmax(scores, dim=-2) * values).sum(-2).bfloat16()


@fused
def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Inner activations [N, experts, inner] of gate and up of the same shape, times routing weights [N, experts]."""
    inner = torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (inner * weights.unsqueeze(-1)).bfloat16()


@fused
def engram_write(streams: Tensor, projected: Tensor, query: Tensor, key: Tensor, visible: Tensor, eps: float) -> Tensor:
    """Streams [N, m, H] with gated memory added; projected [N, (m + 1) H]; visible [N] is 0 on image positions."""
    count, hidden = streams.shape[1:]
    wide, memory = streams.float(), projected.float()
    keys, value = memory[:, :-hidden].unflatten(-1, (count, hidden)), memory[:, None, -hidden:]
    scale = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (wide * query.float() * key.float() * keys).sum(-1) * scale * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(DOT_MIN).sqrt(), dot)) * visible.unsqueeze(-1)
    return (wide + gate.unsqueeze(-1) * value).bfloat16()


@fused
def index_logits(products: Tensor, weights: Tensor) -> Tensor:
    """Indexer scores [B, n, E] of products [B, n, heads, E] and head weights [B, n, heads]."""
    return (products.float().relu() * weights.float().unsqueeze(-1)).sum(2)
