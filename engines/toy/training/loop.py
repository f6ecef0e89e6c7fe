"""The training loop: batches in, better weights out, progress told."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.names import Part
from shoal.engines.toy.tasks.mixture import TASKS
from shoal.engines.toy.training.drafter import ANCHORS, draft, draft_loss, draw_anchors
from shoal.engines.toy.training.experts import Load
from shoal.engines.toy.training.images import image_rows
from shoal.engines.toy.training.network import Network, Weights
from shoal.engines.toy.training.optimiser import Optimiser
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.stacks import Stacks
from shoal.engines.toy.training.stages import Stage
from torch import Tensor
from torch.nn import functional

NORM_MAX = 1.0
BALANCE_STEP = 1e-3
"""Change of a router's selection bias per step towards even use (DeepSeek-V3, auxiliary-loss-free balancing)."""
REPORT_EVERY = 25
INDEX_WEIGHT = 1.0
RATES = {"layers.1.engram.embed.weight": 3.0, "layers.4.engram.embed.weight": 3.0}


Step = tuple[Tensor, dict[str, Load], str]
"""Loss, expert loads and a line to show."""


@dataclass(slots=True)
class Trainer:
    """Masters, optimiser and network of one run."""

    config: ModelConfig
    stacks: Stacks
    tell: Callable[[str], None]
    optimiser: Optimiser = field(init=False)
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        self.optimiser = Optimiser(self.stacks.parameters, self.config.text.o_groups, rates=RATES)
        self.network = Network(self.config)

    def run(self, stage: Stage, steps: Iterator[StepBatch], first_step: int, until: float) -> int:
        """Train until the stage ends or the clock (time.monotonic) passes `until`; the steps done of the stage."""
        parts = (Part.DRAFTER,) if stage.drafter else tuple(set(Part) - {Part.DRAFTER})
        self.stacks.require_grad(n for n in self.stacks.part(*parts) if not n.endswith(("gate.bias", "gate.bias_vl")))
        device = next(iter(self.stacks.parameters.values())).device
        began, tokens = time.monotonic(), 0
        for step, batch in enumerate(steps, start=first_step):
            batch = batch.to(device)
            shown = step % REPORT_EVERY == 0 or step == stage.steps - 1
            line = self._step(stage, step, batch, shown)
            tokens += batch.rows.ids.numel()
            if shown:
                speed = tokens / (time.monotonic() - began)
                self.tell(f"{stage.name} {step + 1}/{stage.steps} {line} {speed / 1e3:.0f} ktok/s")
            if time.monotonic() > until:
                break
        if device.type == "cuda":
            self.tell(f"{stage.name}: at most {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
        return step + 1

    def _step(self, stage: Stage, step: int, batch: StepBatch, shown: bool) -> str:
        weights = self.stacks.step_weights()
        loss, loads, line = (self._draft if stage.drafter else self._predict)(weights, batch, stage, shown)
        loss.backward()
        norm = self.optimiser.step(stage.rate(step), NORM_MAX)
        self._balance(loads)
        return f"loss {loss.item():.3f} norm {norm:.2f} {line}" if shown else ""

    def embed(self, weights: Weights, batch: StepBatch) -> Tensor:
        """Embedding rows [B, T, H] with the pictures' rows in their places."""
        ids = batch.rows.ids
        embedded = functional.embedding(ids.flatten(), weights["embed.weight"])
        if batch.pictures is not None:
            rows = image_rows(weights, batch.pictures, self.config)
            embedded = embedded.index_copy(0, batch.pictures.positions, rows)
        return embedded.unflatten(0, ids.shape)

    def _predict(self, weights: Weights, batch: StepBatch, stage: Stage, shown: bool) -> Step:
        """The trunk's loss on the next token, and its indexer's."""
        output = self.network.forward(weights, batch.rows, self.embed(weights, batch), stage.options)
        targets, hidden = batch.rows.ids[:, 1:], output.hidden[:, :-1]
        logits = functional.linear(hidden, weights["head.weight"]).flatten(0, 1)
        losses = functional.cross_entropy(logits.float(), targets.flatten(), reduction="none")
        weight = batch.weight[:, :-1].flatten()
        loss = (losses * weight).sum() / weight.sum()
        line = f"index {output.index_loss.item():.3f} {accuracies(logits, batch)}" if shown else ""
        return loss + INDEX_WEIGHT * output.index_loss, output.loads, line

    def _draft(self, weights: Weights, batch: StepBatch, stage: Stage, shown: bool) -> Step:
        """The drafter's loss on the frozen trunk."""
        with torch.no_grad():
            output = self.network.forward(weights, batch.rows, self.embed(weights, batch), stage.options)
        anchors = draw_anchors(batch, self.config.text.dspark_block_size, ANCHORS)
        phases = self.network.phases(batch.rows.ids.shape[1], batch.rows.ids.device)
        drafts = draft(weights, batch, output, anchors, self.config, phases)
        losses = draft_loss(drafts, weights, batch, output, anchors)
        accepted = [f"{value:.2f}" for value in losses.accepted.tolist()] if shown else []
        line = f"accepted {' '.join(accepted)} length {1 + float(losses.accepted.sum()):.2f} off {losses.calibration.item():.3f}"
        return losses.total, drafts.loads, line if shown else ""

    @torch.no_grad()
    def _balance(self, loads: dict[str, Load]) -> None:
        """Move selection biases towards experts that were chosen less than others."""
        for kind, name in (("text", "gate.bias"), ("image", "gate.bias_vl")):
            stacked = torch.stack([getattr(load, kind) for load in loads.values()])
            error = stacked.mean(-1, keepdim=True) - stacked
            prefix = next(iter(loads)).partition(".")[0]  # all of them trunk layers, or all of them the drafter's
            self.stacks.parameters[f"{prefix}.*.ffn.{name}"].add_(error.sign(), alpha=BALANCE_STEP)


@torch.no_grad()
def accuracies(logits: Tensor, batch: StepBatch) -> str:
    """Share of answers of each task whose every token is the likeliest (teacher-forced), as text."""
    answer = batch.answer[:, :-1]
    ids = batch.rows.ids
    right = logits.argmax(-1).view(answer.shape) == ids[:, 1:]
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    # A document is known by its row and number; what is not an answer counts for none.
    top = int(batch.rows.document.max()) + 1
    place = torch.where(answer >= 0, rows * top + batch.rows.document[:, :-1], 0).flatten()
    size = len(ids) * top
    wrong = torch.zeros(size, device=ids.device).index_add_(0, place, (~right & (answer >= 0)).flatten().float())
    task = torch.full((size,), -1, device=ids.device).scatter_(0, place, answer.flatten().long())
    found = []
    for number, name in enumerate(TASKS):
        own = task == number
        count = int(own.sum())
        if count:
            found.append(f"{name} {100 * float((wrong[own] == 0).float().mean()):.0f}%")
    return " ".join(found)
