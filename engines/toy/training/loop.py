"""The training loop: batches in, better weights out, progress told."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from shoal.engines.toy.tasks.mixture import TASKS
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.replay import Replay
from shoal.engines.toy.training.stages import Stage, Trains
from shoal.engines.toy.training.step import Learner, Outcome
from torch import Tensor

REPORT_EVERY = 50
KEEP_EVERY_S = 120.0
"""A run that is stopped from outside loses no more than this."""
BIASES = ("gate.bias", "gate.bias_vl")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a run does beside learning: tell a line, keep the state after so many steps of the stage."""

    tell: Callable[[str], None]
    keep: Callable[[int], object] = lambda done: None


def train(
    learner: Learner, stage: Stage, batches: Iterator[StepBatch], first_step: int, until: float, hooks: Hooks
) -> int:
    """Train until the stage ends or the clock (time.monotonic) passes `until`; the steps done of the stage."""
    stacks = learner.stacks
    stacks.require_grad(n for n in stacks.parameters if not n.endswith(BIASES) and trained(stage, n))
    device = next(iter(stacks.parameters.values())).device
    step = Replay(lambda batch, rate: learner.step(stage, batch, rate), device)
    began = kept = time.monotonic()
    tokens, done = 0, first_step
    for batch in batches:
        outcome = step(batch, stage.rate(done))
        done, tokens = done + 1, tokens + batch.rows.ids.numel()
        if done % REPORT_EVERY == 0 or done in (1, stage.steps):
            shown = described(outcome, batch)  # waits for the step
            speed = tokens / (time.monotonic() - began) / 1e3
            hooks.tell(f"{stage.name} {done}/{stage.steps} {shown} {speed:.1f} ktok/s")
            began, tokens = time.monotonic(), 0
        if time.monotonic() > kept + KEEP_EVERY_S:
            hooks.keep(done)
            kept = time.monotonic()
        if time.monotonic() > until:
            break
    if device.type == "cuda":
        hooks.tell(f"{stage.name}: at most {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
        del step, outcome  # the graph holds a stage's activations
        torch.cuda.empty_cache()
    return done


def trained(stage: Stage, name: str) -> bool:
    """Whether gradients of a stack are wanted. A drafter's stage keeps the trunk's: they are cut off at its results."""
    return stage.trains is not Trains.INDEXER or ".indexer." in name


def described(outcome: Outcome, batch: StepBatch) -> str:
    """A step's outcome as text."""
    text = f"loss {float(outcome.loss):.3f} norm {float(outcome.norm):.2f}"
    if outcome.index_loss is not None and outcome.right is not None:
        return f"{text} index {float(outcome.index_loss):.3f} {accuracies(outcome.right.cpu(), batch)}"
    assert outcome.accepted is not None, "a step tells of the trunk or of the drafter"
    assert outcome.off is not None, "acceptance comes with the confidence's error"
    accepted = outcome.accepted.tolist()
    each = " ".join(f"{value:.2f}" for value in accepted)
    return f"{text} accepted {each} length {1 + sum(accepted):.2f} confidence off {float(outcome.off):.3f}"


def accuracies(right: Tensor, batch: StepBatch) -> str:
    """Share of documents of each task whose every answer token is the likeliest (teacher-forced), as text."""
    answer, document = batch.answer[:, :-1], batch.rows.document[:, :-1]
    rows = torch.arange(len(right))[:, None]
    top = int(document.max()) + 1
    # A document is known by its row and number; what is not an answer counts for document 0 of row 0, which nobody has.
    place = torch.where(answer >= 0, rows * top + document, 0).flatten()
    size = len(right) * top
    wrong = torch.zeros(size).index_add_(0, place, (~right & (answer >= 0)).flatten().float())
    task = torch.full((size,), -1).scatter_(0, place, answer.flatten().long())
    found = []
    for number, name in enumerate(TASKS):
        own = task == number
        if bool(own.any()):
            found.append(f"{name} {100 * float((wrong[own] == 0).float().mean()):.0f}%")
    return " ".join(found)
