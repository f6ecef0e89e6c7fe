"""The training loop: batches in, better weights out, progress told."""

import time
from collections.abc import Callable, Iterator

import torch
from shoal.engines.toy.tasks.mixture import TASKS
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.replay import Replay
from shoal.engines.toy.training.stages import Stage
from shoal.engines.toy.training.step import Learner, Outcome
from torch import Tensor

REPORT_EVERY = 50
BIASES = ("gate.bias", "gate.bias_vl")


def train(
    learner: Learner,
    stage: Stage,
    batches: Iterator[StepBatch],
    first_step: int,
    until: float,
    tell: Callable[[str], None],
    with_graph: bool = True,
) -> int:
    """Train until the stage ends or the clock (time.monotonic) passes `until`; the steps done of the stage."""
    stacks = learner.stacks
    stacks.require_grad(n for n in stacks.parameters if not n.endswith(BIASES))
    device = next(iter(stacks.parameters.values())).device
    step = Replay(lambda batch, rate: learner.step(stage, batch, rate), device, with_graph)
    began, tokens, done = time.monotonic(), 0, first_step
    for batch in batches:
        outcome = step(batch, stage.rate(done))
        done, tokens = done + 1, tokens + batch.rows.ids.numel()
        if done % REPORT_EVERY == 0 or done in (1, stage.steps):
            tell(f"{stage.name} {done}/{stage.steps} {described(outcome, batch)}")
            tell(f"  {tokens / (time.monotonic() - began) / 1e3:.0f} ktok/s")
            began, tokens = time.monotonic(), 0
        if time.monotonic() > until:
            break
    if device.type == "cuda":
        tell(f"{stage.name}: at most {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
        del step, outcome  # the graph holds a stage's activations
        torch.cuda.empty_cache()
    return done


def described(outcome: Outcome, batch: StepBatch) -> str:
    """A step's outcome as text."""
    text = f"loss {float(outcome.loss):.3f} norm {float(outcome.norm):.2f}"
    if outcome.index_loss is not None and outcome.right is not None:
        return f"{text} index {float(outcome.index_loss):.3f} {accuracies(outcome.right.cpu(), batch)}"
    assert outcome.accepted is not None and outcome.off is not None
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
