"""Training rows by number: which samples a pack holds depends on the seed, its stage and its number alone."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from shoal.engines.config import Truncation
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram import EngramHash, class_map
from shoal.engines.toy.tasks.encoding import Codec
from shoal.engines.toy.tasks.mixture import MIXTURES, TASKS, encoded_sample, training_random
from shoal.engines.toy.tokenizer import toy_tokenizer
from shoal.engines.toy.training.packing import Packed, StepBatch, collate, pack
from shoal.engines.toy.training.stages import Stage
from torch.utils.data import DataLoader, Dataset, Subset

FILL = 1.15
"""Tokens drawn for a pack over what it holds: packing leaves out what fits nowhere."""


@dataclass(slots=True, eq=False)
class Examples(Dataset[Packed]):
    """Packs of one stage; each worker process makes its own codec and hash."""

    config: ModelConfig
    stage: Stage
    seed: int
    _codec: Codec | None = field(default=None, repr=False)
    _hash: EngramHash | None = field(default=None, repr=False)

    def __getitem__(self, number: int) -> Packed:
        """Pack `number` of the stage."""
        if self._codec is None or self._hash is None:
            torch.set_num_threads(1)
            tokenizer = toy_tokenizer()
            self._codec, self._hash = Codec.of(tokenizer), EngramHash.build(self.config, class_map(tokenizer))
        # Stages draw from sources of their own: crc32 of the name tells them apart.
        random = training_random(self.seed + (zlib.crc32(self.stage.name.encode()) << 16), number)
        mixture, tokens, samples = MIXTURES[self.stage.mixture], self.stage.tokens, []
        wanted = tokens * self.stage.pack_rows * FILL
        while wanted > 0:
            drawn, encoded = encoded_sample(random, mixture, tokens, self._codec)
            samples.append((TASKS.index(drawn.task), encoded))
            wanted -= len(encoded.ids)
        shape = (self.stage.pack_rows, self.stage.tokens)
        return pack(samples, shape, self.stage.pictures_max, self.config, self._hash, Truncation().keep)

    def __len__(self) -> int:
        return self.stage.steps * self.stage.packs


def batches(config: ModelConfig, stage: Stage, seed: int, workers: int, first_step: int = 0) -> Iterator[StepBatch]:
    """The stage's steps from `first_step` on, made ahead by worker processes."""
    packs = Subset(Examples(config, stage, seed), range(first_step * stage.packs, stage.steps * stage.packs))
    loader = DataLoader(
        packs,
        batch_size=stage.packs,
        num_workers=workers,
        collate_fn=lambda parts: collate(parts, stage.pictures_max, config),
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=8 if workers else None,
    )
    return iter(loader)
