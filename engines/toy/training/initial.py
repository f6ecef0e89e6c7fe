"""Weights to start training from: unit-variance products, small additions to the streams, near-identity mixing."""

import numpy as np
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.names import float_specs
from shoal.engines.toy.initialise import Rule, draw, generator
from torch import Tensor

RULES: tuple[Rule, ...] = (
    ("*norm*.weight", 1.0, 0.0, False),
    ("*engram.[qk]_weight", 1.0, 0.0, False),
    ("*engram.embed.weight", 0.0, 0.1, False),
    ("*markov_head.head.weight", 0.0, 0.0, False),
    ("*markov_head.embed.weight", 0.0, 0.1, False),
    ("*confidence_head*", 0.0, 0.0, False),
    ("embed.weight", 0.0, 0.5, False),
    ("image_*", 0.0, 0.5, False),
    ("head.weight", 0.0, 0.5, True),
    ("*hc_*_fn", 0.0, 1.0, True),
    ("*hc_*_scale", 0.1, 0.0, False),
    ("*gate.bias*", 0.0, 0.0, False),
    ("*attn_sink", 0.0, 0.0, False),
    ("*.bias", 0.0, 0.0, False),
    ("*wo_b.weight", 0.0, 0.3, True),
    ("*.w2.weight", 0.0, 0.3, True),
    ("*.weight", 0.0, 1.0, True),
)
OWN_STREAM, OTHER_STREAM = 1.0, -1.5
KEPT_STREAM = 3.0


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Float32 weights by name; each depends on its name and the seed alone."""
    return {
        name: _mixing_base(name, seed) if name.endswith("_base") else draw(name, spec.shape, RULES, seed)
        for name, spec in float_specs(config).items()
    }


def _mixing_base(name: str, seed: int) -> Tensor:
    """Each sublayer reads mostly one stream, in turn, writes to all, and leaves the streams apart.

    The noise on what it writes tells the streams apart: alike ones would have like gradients.
    """
    layer, sublayer = int(name.split(".")[1]), int("hc_ffn" in name)
    pre = np.full(4, OTHER_STREAM, dtype=np.float32)
    pre[(2 * layer + sublayer) % 4] = OWN_STREAM
    post = generator(name, seed).standard_normal(4, dtype=np.float32) * np.float32(0.5)
    comb = KEPT_STREAM * np.eye(4, dtype=np.float32)
    return torch.from_numpy(np.concatenate((pre, post, comb.ravel())).astype(np.float32))
