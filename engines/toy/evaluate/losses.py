"""Losing one cached kind: what an answer is worth when its bytes never survive a step.

A loss is what a defect of a transfer or a store would look like to the model: after every step of the engine all bytes
of the kind read as zeros, in every block or slot, so that a step sees of this kind only what it has written itself.
Zero bytes decode to zero values in every row format. The prompt is cut before its last `TAIL_TOKENS` tokens, so that
even the question is read without them.
- main KV: compressed entries are found by their index keys, but carry nothing.
- index keys: entries are intact, but all lost ones score alike, so the choice of which to read is blind. (Prompts
  with fewer entries than the indexer chooses do not depend on index keys at all.)
- window: the ring rows of all layers, the latest tokens' own KV.
- Engram: not cached bytes but a memory in the weights; its write into the residual streams is left out.
- images: the embedding rows of every picture are zeros, as if the encoder's answer had been lost.
"""

import dataclasses
from enum import StrEnum

from shoal.engines.model.decoder import Model
from shoal.engines.run.memory import DeviceMemory

TAIL_TOKENS = 32
"""The last tokens of a prompt that are computed after the loss: more than the longest question and chat marks."""


class Loss(StrEnum):
    """What is lost."""

    MAIN = "main KV"
    INDEX = "index keys"
    WINDOW = "window"
    ENGRAM = "engram"
    IMAGES = "images"


def forget(memory: DeviceMemory, loss: Loss) -> None:
    """Zero the bytes of a cached kind in all blocks and slots; nothing for kinds that are not bytes of an engine."""
    if loss in (Loss.MAIN, Loss.INDEX):
        kind = "main" if loss is Loss.MAIN else "index"
        for section in memory.block_layout.sections:
            if section.kind == kind:
                memory.blocks[:, section.offset : section.offset + section.bytes].zero_()
    elif loss is Loss.WINDOW:
        for ring in memory.slot_layout.rings:
            memory.slots[:, ring.offset : ring.offset + ring.bytes].zero_()


def without_engram(model: Model) -> Model:
    """The same model, sharing its weights, whose layers own no Engram."""
    layers = tuple(dataclasses.replace(layer, engram=None) for layer in model.trunk.layers)
    return dataclasses.replace(model, trunk=dataclasses.replace(model.trunk, layers=layers))
