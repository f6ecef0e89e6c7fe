"""Training the drafter on a frozen trunk: blocks of drafts at random places of the answers.

Loss (DeepSpec `loss.py`): per place in the block, weighted exp(-i / 4), 0.1 cross-entropy with the text's token, 0.9 L1
distance of the draft's distribution from the trunk's, and the confidence's cross-entropy with 1 - L1 / 2, which is the
probability that such a draft is accepted.
"""

from dataclasses import dataclass

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.toy.training import fused
from shoal.engines.toy.training.experts import Load, run_experts
from shoal.engines.toy.training.network import (
    Output,
    Phases,
    Weights,
    enter,
    grouped_output,
    project,
    run_block,
    window_kv,
)
from shoal.engines.toy.training.packing import StepBatch
from torch import Tensor
from torch.nn import functional

TOKEN_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0
ANCHORS = 4096
"""Blocks of a step."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks start: row [A] and position [A] of the last main entry; the golden token is the next one.

    inside bool [A, n]: the token that draft i proposes belongs to the same document.
    """

    row: Tensor
    at: Tensor
    inside: Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """logits float32 [A, n, V] with teacher-forced Markov correction, confidence logits [A, n], expert loads."""

    logits: Tensor
    confidence: Tensor
    loads: dict[str, Load]


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """The loss; accepted [n]: mean acceptance of each place and all before it; off: mean |confidence - acceptance|."""

    total: Tensor
    accepted: Tensor
    off: Tensor


def draw_anchors(batch: StepBatch, size: int, count: int = ANCHORS) -> Anchors:
    """`count` places whose next two tokens are answers (one golden, one to draft), drawn at random.

    Where there are fewer, the rest are places with nothing `inside`.
    """
    answer, document = batch.answer, batch.rows.document
    fits = (answer[:, :-1] >= 0) & (answer[:, 1:] >= 0)
    last = torch.arange(fits.shape[1], device=fits.device) >= fits.shape[1] - size - 1
    order = torch.rand(fits.shape, device=fits.device).masked_fill(~fits | last, -1.0).flatten()
    drawn = order.topk(min(count, order.numel()))
    rows = drawn.indices // fits.shape[1]
    at = (drawn.indices % fits.shape[1]).clamp_max(fits.shape[1] - size - 2)
    ahead = at[:, None] + torch.arange(2, size + 2, device=at.device)
    inside = document[rows[:, None], ahead] == document[rows, at][:, None]
    return Anchors(rows, at, inside & (drawn.values >= 0)[:, None])


def draft(
    weights: Weights, batch: StepBatch, output: Output, anchors: Anchors, config: ModelConfig, phases: Phases
) -> Drafts:
    """One block at each anchor, from the trunk's features."""
    text, size = config.text, config.text.dspark_block_size
    features = functional.linear(output.taps.flatten(0, 1), weights["mtp.0.main_proj.weight"])
    features = fused.rms_norm(features, weights["mtp.0.main_norm.weight"], text.rms_norm_eps)
    places = anchors.at[:, None] + torch.arange(1, size + 1, device=anchors.at.device)
    known = batch.rows.ids[anchors.row[:, None], places]
    inputs = torch.full_like(known, text.dspark_noise_token_id)
    inputs[:, 0] = known[:, 0]
    residual = enter(functional.embedding(inputs, weights["embed.weight"]).flatten(0, 1), text.hc_mult)
    by = (phases.window[0][places].flatten(0, 1), phases.window[1][places].flatten(0, 1))
    window, seen = _window(batch, anchors, config.window)
    loads: dict[str, Load] = {}
    no_image = torch.zeros(len(residual[0]), dtype=torch.bool, device=places.device)
    for index in range(text.num_nextn_predict_layers):
        own = f"mtp.{index}"
        kv = window_kv(weights, f"{own}.attn", features, phases.window, config)
        main = (kv.unflatten(0, batch.rows.ids.shape)[anchors.row[:, None], window], seen)

        def attention(x: Tensor, own: str = own, main: tuple[Tensor, Tensor] = main) -> Tensor:
            return _attention(weights, f"{own}.attn", x, main, by, config)

        def experts(x: Tensor, own: str = own) -> Tensor:
            y, loads[own] = run_experts(weights, f"{own}.ffn", x, no_image, config, text.dspark_num_experts_per_tok)
            return y

        residual = run_block(weights, own, residual, (attention, experts), config)
    hidden = fused.collapse(*residual).unflatten(0, (-1, size))
    logits, confidence = _head(weights, hidden, known, config)
    return Drafts(logits, confidence, loads)


def _window(batch: StepBatch, anchors: Anchors, width: int) -> tuple[Tensor, Tensor]:
    """Positions [A, W] of the main entries before and at each anchor, and which of them exist in its document."""
    at = anchors.at[:, None] + torch.arange(1 - width, 1, device=anchors.at.device)
    place = at.clamp_min(0)
    document = batch.rows.document
    same = document[anchors.row[:, None], place] == document[anchors.row, anchors.at][:, None]
    return place, (at >= 0) & same


def _attention(
    weights: Weights, name: str, x: Tensor, main: tuple[Tensor, Tensor], by: tuple[Tensor, Tensor], config: ModelConfig
) -> Tensor:
    """Output [A n, H]: every draft sees the main entries and its whole block, both ways."""
    text, (keys, seen) = config.text, main
    size = len(x) // len(seen)
    _, q, own = project(weights, name, x, by, config)
    q, own = q.unflatten(0, (-1, size)), own.unflatten(0, (-1, size))
    keys = torch.cat((keys, own), dim=1)
    scores = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).float().unflatten(1, (size, -1)) * text.head_dim**-0.5
    mask = torch.cat((seen, seen.new_ones(len(seen), size)), dim=1)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    sink = weights[f"{name}.attn_sink"].view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    by_key = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1].bfloat16()
    out = torch.bmm(by_key.flatten(1, 2), keys).view(q.shape)
    return grouped_output(weights, name, out, by, text.o_groups)


def _head(weights: Weights, hidden: Tensor, known: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Logits [A, n, V] and confidence logits [A, n] of collapsed rows [A, n, H]; the tokens before are the text's."""
    last = f"mtp.{config.text.num_nextn_predict_layers - 1}"
    normed = fused.rms_norm(hidden, weights[f"{last}.norm.weight"], config.text.rms_norm_eps)
    markov = functional.embedding(known, weights[f"{last}.markov_head.embed.weight"])
    logits = functional.linear(normed, weights["head.weight"]).float()
    logits = logits + functional.linear(markov, weights[f"{last}.markov_head.head.weight"]).float()
    # Released heads judge by the row before the last norm. The text's tokens lead here; served, the drafts do.
    joined = torch.cat((hidden.detach(), markov.detach()), dim=-1)
    return logits, functional.linear(joined, weights[f"{last}.confidence_head.proj.weight"]).squeeze(-1).float()


def draft_loss(drafts: Drafts, weights: Weights, batch: StepBatch, output: Output, anchors: Anchors) -> DraftLoss:
    """The loss of drafts against the trunk's own distributions at the same places."""
    size = drafts.logits.shape[1]
    steps = torch.arange(size, device=anchors.at.device)
    places = anchors.at[:, None] + 1 + steps
    rows = anchors.row[:, None]
    target = torch.softmax(functional.linear(output.hidden[rows, places], weights["head.weight"]).float(), dim=-1)
    drafted = torch.log_softmax(drafts.logits, dim=-1)
    tokens = batch.rows.ids[rows, places + 1]
    entropy = -drafted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    distance = (drafted.exp() - target).abs().sum(-1)
    accepted = (1 - distance.detach() / 2).clamp(0, 1)
    judged = functional.binary_cross_entropy_with_logits(drafts.confidence, accepted, reduction="none")
    weight = torch.exp(-steps / DECAY) * anchors.inside
    loss = TOKEN_WEIGHT * entropy + DISTANCE_WEIGHT * distance + CONFIDENCE_WEIGHT * judged
    total = (loss * weight).sum() / weight.sum().clamp_min(1)
    inside = anchors.inside.float()
    running = (accepted.cumprod(-1) * inside).sum(0) / inside.sum(0).clamp_min(1)
    apart = ((torch.sigmoid(drafts.confidence) - accepted).abs() * inside).sum() / inside.sum()
    return DraftLoss(total, running.detach(), apart.detach())
