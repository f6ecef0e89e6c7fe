"""Steps as a recorded CUDA graph: thousands of small kernels start without Python, which takes longer than they do."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.step import Outcome
from torch import Tensor

WARM_UP_STEPS = 3
"""Steps before the recording: they compile kernels and create the optimiser's state."""

Value = TypeVar("Value")
Step = Callable[[StepBatch, Tensor], Outcome]


class Replay:
    """A step function whose calls after the first few replay its kernels on the same memory.

    Batches must have the shapes of the first one, outcomes are overwritten by the next call. On a CPU every call just
    calls the function.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._records = device.type == "cuda"
        self._rate = torch.zeros((), device=device)
        self._batch: StepBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome: Outcome | None = None
        self._calls = 0

    def __call__(self, batch: StepBatch, rate: float) -> Outcome:
        """One step."""
        self._rate.fill_(rate)
        if self._batch is None:
            self._batch = moved(batch, lambda tensor: tensor.to(self._device))
        else:
            _copy(self._batch, batch)
        self._calls += 1
        if not self._records or self._calls <= WARM_UP_STEPS:
            return self._step(self._batch, self._rate)
        if self._graph is None:
            self._record()
        assert self._graph is not None, "recorded above"
        assert self._outcome is not None, "recorded with the graph"
        self._graph.replay()
        return self._outcome

    def _record(self) -> None:
        assert self._batch is not None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outcome = self._step(self._batch, self._rate)
        self._graph = graph


def moved(value: Value, move: Callable[[Tensor], Tensor]) -> Value:
    """A dataclass of tensors (and of such dataclasses) with every tensor moved."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
    new = {n: move(v) if isinstance(v, Tensor) else moved(v, move) for n, v in fields.items()}
    return dataclasses.replace(value, **new)  # type: ignore[type-var]


def _copy(target: object, source: object) -> None:
    for f in dataclasses.fields(target):  # type: ignore[arg-type]
        into, value = getattr(target, f.name), getattr(source, f.name)
        if isinstance(into, Tensor):
            assert into.shape == value.shape, f"{f.name}: {tuple(value.shape)} after {tuple(into.shape)}"
            into.copy_(value, non_blocking=True)
        else:
            _copy(into, value)
