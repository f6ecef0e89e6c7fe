"""A probe that keeps what it sees, and the sequences that fixtures describe."""

from dataclasses import dataclass, field

import numpy as np
import torch
from shoal.engines.model.check.report import FixtureError, Reference
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.decoder import Model
from shoal.engines.model.images import SpanToken
from shoal.engines.model.vision import VisionEncoder
from torch import Tensor

SUFFIX_PATCHES, SUFFIX_GRID = ".patches", ".grid"


@dataclass(slots=True)
class Trace:
    """Recorded values by name, then layer."""

    values: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Keep a value."""
        self.values.setdefault(name, {})[layer] = value

    def stacked(self, name: str) -> Tensor:
        """The values of all layers that recorded `name`, in layer order, padded with -1 in the last dimension."""
        found = [value for _, value in sorted(self.values[name].items())]
        width = max(value.shape[-1] for value in found)
        padded = [torch.nn.functional.pad(v, (0, width - v.shape[-1]), value=-1) for v in found]
        return torch.stack(padded)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence of a fixture: int64 [T] ids, bool [T] image positions and the rows that stand there."""

    name: str
    token_ids: Tensor
    image_mask: Tensor
    image_rows: Tensor

    def first(self, count: int) -> "Prompt":
        """The first `count` tokens."""
        mask = self.image_mask[:count]
        return Prompt(self.name, self.token_ids[:count], mask, self.image_rows[: int(mask.sum())])


def read_prompt(reference: Reference, name: str, encoder: VisionEncoder, config: ModelConfig) -> Prompt:
    """The prompt called `name`; its pictures are encoded from the fixture's patches. Raises FixtureError."""
    ids = torch.from_numpy(reference.take(f"{name}.input_ids").astype(np.int64))
    types = torch.from_numpy(reference.take(f"{name}.token_types").astype(np.int64))
    rows = [torch.empty(0, config.hidden)]
    index = 0
    while reference.has(f"{name}.image{index}{SUFFIX_PATCHES}"):
        stem = f"{name}.image{index}"
        patches = torch.from_numpy(reference.floats(stem + SUFFIX_PATCHES)).to(torch.float32)
        grid_rows, grid_columns = (int(v) for v in reference.take(stem + SUFFIX_GRID))
        rows.append(encoder.encode(patches, (grid_rows, grid_columns)))
        index += 1
    mask, found = types >= int(SpanToken.START), torch.cat(rows)
    vocab = config.text.vocab_size
    if ids.ndim != 1 or not len(ids) or ids.shape != types.shape or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise FixtureError(
            f"{reference.file}: {name}.input_ids {list(ids.shape)} and {name}.token_types {list(types.shape)} must be "
            f"one row of equal length, ids in [0, {vocab}); write the prompt again"
        )
    if int(mask.sum()) != len(found):
        raise FixtureError(
            f"{reference.file}: {name}.token_types has {int(mask.sum())} image positions, its {index} pictures fill "
            f"{len(found)}; write {name}.imageI.patches and .grid of every picture"
        )
    return Prompt(name, ids, mask, found)


def run(model: Model, prompt: Prompt, trace: Trace | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden [T, H], taps [T, taps * H] and logits [T, V] of a whole prompt."""
    out = model.forward_full(prompt.token_ids, prompt.image_mask, prompt.image_rows, probe=trace)
    return out.hidden, out.taps, model.logits(out.hidden)
