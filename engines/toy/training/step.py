"""One training step as a function of tensors alone: no value goes to the CPU, so a GPU can replay it as a graph."""

import dataclasses
from dataclasses import dataclass, field

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.toy.training.drafter import draft, draft_loss, draw_anchors
from shoal.engines.toy.training.experts import Load
from shoal.engines.toy.training.images import image_rows
from shoal.engines.toy.training.network import Network, Weights
from shoal.engines.toy.training.optimiser import Optimiser
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.stacks import Stacks
from shoal.engines.toy.training.stages import Stage, Trains
from torch import Tensor
from torch.nn import functional

BALANCE_STEP = 1e-3
"""Change of a router's selection bias per step towards even use (DeepSeek-V3, auxiliary-loss-free balancing)."""
RATES = {".engram.embed.": 3.0, "_fn": 0.1, "head.weight": 0.5, "gate.weight": 0.5, "patch_embed.proj.weight": 0.3}
"""Factors on the rate by part of a name: more for Engram's tables, whose rows are seldom read, less for what starts
small beside an AdamW step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step tells: loss, gradient norm; of the trunk index_loss and right bool [B, T - 1], the next token is the
    likeliest; of the drafter accepted [n] and off, the mean error of the confidence. What does not apply is None."""

    loss: Tensor
    norm: Tensor
    index_loss: Tensor | None = None
    right: Tensor | None = None
    accepted: Tensor | None = None
    off: Tensor | None = None


@dataclass(slots=True)
class Learner:
    """Masters, optimiser and network: everything that a step reads and changes."""

    config: ModelConfig
    stacks: Stacks
    optimiser: Optimiser = field(init=False)
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        rates = {n: rate for n in self.stacks.parameters for part, rate in RATES.items() if part in n}
        self.optimiser = Optimiser(self.stacks.parameters, self.config.text.o_groups, rates=rates)
        self.network = Network(self.config)

    def step(self, stage: Stage, batch: StepBatch, rate: Tensor) -> Outcome:
        """Learn from one batch with the rate, a float32 scalar tensor."""
        weights = self.stacks.step_weights()
        outcome, loads = (self._draft if stage.trains is Trains.DRAFTER else self._predict)(stage, batch, weights)
        torch.autograd.backward(outcome.loss)
        norm = self.optimiser.step(rate)
        self._balance(loads)
        shown = (
            None if v is None else v.detach()
            for v in (outcome.index_loss, outcome.right, outcome.accepted, outcome.off)
        )
        return Outcome(outcome.loss.detach(), norm, *shown)

    def embed(self, weights: Weights, batch: StepBatch) -> Tensor:
        """Embedding rows [B, T, H] with the pictures' rows in their places."""
        ids = batch.rows.ids
        embedded = functional.embedding(ids.flatten(), weights["embed.weight"])
        rows = image_rows(weights, batch.pictures, self.config)
        # Span places that no picture fills point behind the last row.
        embedded = torch.cat((embedded, embedded.new_zeros(1, embedded.shape[1])))
        shown: Tensor = embedded.index_copy(0, batch.pictures.positions, rows)[:-1].unflatten(0, ids.shape)
        return shown

    def _predict(self, stage: Stage, batch: StepBatch, weights: Weights) -> tuple[Outcome, dict[str, Load]]:
        """The trunk's loss on the next token, and its indexer's."""
        output = self.network.forward(weights, batch.rows, self.embed(weights, batch), stage.options)
        targets, hidden = batch.rows.ids[:, 1:], output.hidden[:, :-1]
        logits = functional.linear(hidden, weights["head.weight"]).flatten(0, 1)
        losses = functional.cross_entropy(logits.float(), targets.flatten(), reduction="none")
        weight = batch.weight[:, :-1].flatten()
        loss = (losses * weight).sum() / weight.sum() + output.index_loss
        right = logits.detach().argmax(-1).view(targets.shape) == targets
        return Outcome(loss, loss, output.index_loss, right), output.loads

    def _draft(self, stage: Stage, batch: StepBatch, weights: Weights) -> tuple[Outcome, dict[str, Load]]:
        """The drafter's loss on the frozen trunk."""
        # The trunk runs as in its own training, by the same kernels; it is the detached results that freeze it.
        output = self.network.forward(weights, batch.rows, self.embed(weights, batch), stage.options)
        output = dataclasses.replace(output, hidden=output.hidden.detach(), taps=output.taps.detach())
        weights = {name: w if name.startswith("mtp.") else w.detach() for name, w in weights.items()}
        anchors = draw_anchors(batch, self.config.text.dspark_block_size)
        rows, count = batch.rows.ids.shape
        phases = self.network.phases(rows, count, batch.rows.ids.device)
        drafts = draft(weights, batch, output, anchors, self.config, phases)
        losses = draft_loss(drafts, weights, batch, output, anchors)
        return Outcome(losses.total, losses.total, accepted=losses.accepted, off=losses.off), drafts.loads

    @torch.no_grad()
    def _balance(self, loads: dict[str, Load]) -> None:
        """Move selection biases towards experts that were chosen less than others."""
        prefix = next(iter(loads)).partition(".")[0]  # all of them trunk layers, or all of them the drafter's
        for kind, name in (("text", "gate.bias"), ("image", "gate.bias_vl")):
            stacked = torch.stack([getattr(load, kind) for load in loads.values()])
            error = stacked.mean(-1, keepdim=True) - stacked
            self.stacks.parameters[f"{prefix}.*.ffn.{name}"].add_(error.sign(), alpha=BALANCE_STEP)
