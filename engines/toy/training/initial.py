"""Weights to start training from: unit-variance products, small additions to the streams, near-identity mixing."""

import zlib
from fnmatch import fnmatch

import numpy as np
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.toy.training.stacks import float_specs
from torch import Tensor

# First match wins: (name pattern, mean, spread, spread is divided by the square root of the inputs).
RULES: tuple[tuple[str, float, float, bool], ...] = (
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
    return {name: _draw(name, spec.shape, seed) for name, spec in float_specs(config).items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    if fnmatch(name, "*hc_*_base"):
        return _mixing_base(name, random)
    mean, spread, by_inputs = next(rule[1:] for rule in RULES if fnmatch(name, rule[0]))
    values = random.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values * np.float32(spread / shape[-1] ** 0.5 if by_inputs else spread) + np.float32(mean))


def _mixing_base(name: str, random: np.random.Generator) -> Tensor:
    """Each sublayer reads mostly one stream, in turn, writes to all, and leaves the streams apart.

    The noise on what it writes tells the streams apart: alike ones would have like gradients.
    """
    layer, sublayer = int(name.split(".")[1]), int("hc_ffn" in name)
    pre = np.full(4, OTHER_STREAM, dtype=np.float32)
    pre[(2 * layer + sublayer) % 4] = OWN_STREAM
    post = random.standard_normal(4, dtype=np.float32) * np.float32(0.5)
    comb = KEPT_STREAM * np.eye(4, dtype=np.float32)
    return torch.from_numpy(np.concatenate((pre, post, comb.ravel())).astype(np.float32))
