"""Seeded random weights that behave: bounded activations, used experts, varied text that does not end at once."""

import zlib
from fnmatch import fnmatch

import numpy as np
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.names import float_specs
from tokenizers import Tokenizer
from torch import Tensor

SEED = 41

Rule = tuple[str, float, float, bool]
"""Name pattern, mean, spread, and whether the spread is divided by the square root of the inputs; first match wins."""
# Embeddings outweigh what a sublayer adds, so that rounding is not amplified from layer to layer: bfloat16 against
# float32 moves a logit by a quarter of the usual gap between the two best. Attention and Engram still add enough
# that another token far back changes a quarter of the choices. (Measured with the full-sequence model.)
RULES: tuple[Rule, ...] = (
    ("*norm.weight", 1.0, 0.1, False),
    ("*norm[12].weight", 1.0, 0.1, False),
    ("*engram.[qk]_weight", 1.0, 0.1, False),
    ("*engram.embed.weight", 0.0, 1.0, False),
    ("*engram.wkv.weight", 0.0, 2.0, True),
    ("*markov_head.embed.weight", 0.0, 1.0, False),
    ("*markov_head.head.weight", 0.0, 0.5, True),
    ("embed.weight", 0.0, 4.0, False),
    ("image_*", 0.0, 4.0, False),
    ("aligner.w2.weight", 0.0, 8.0, True),
    ("head.weight", 0.0, 4.0, True),
    ("*hc_*_fn", 0.0, 1.0, True),
    ("*hc_*_base", 0.0, 0.5, False),
    ("*hc_*_scale", 0.6, 0.1, False),
    ("*gate.weight", 0.0, 4.0, True),
    ("*gate.bias*", 0.0, 0.1, False),
    ("*attn_sink", 0.0, 0.5, False),
    ("*attn.wq_b.weight", 0.0, 2.0, True),
    ("*attn.wo_b.weight", 0.0, 2.0, True),
    ("*compressor.wgate.weight", 0.0, 2.0, True),
    ("*.bias", 0.0, 0.1, False),
    ("*experts*.w[13].weight", 0.0, 1.5, True),
    ("*experts*.w2.weight", 0.0, 0.25, True),
    ("*.weight", 0.0, 1.0, True),
)
# Factors on rows of the head, so that greedy text is printable and ends now and then.
ROW_FACTORS = {"special": 0.05, "end": 0.8, "unreadable": 0.3, "readable": 1.0}


def random_weights(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Float32 weights by name, scales left out; each depends on its name and the seed alone."""
    weights = {name: draw(name, spec.shape, RULES, SEED) for name, spec in float_specs(config).items()}
    factors = torch.tensor([ROW_FACTORS[_row_kind(config, tokenizer, i)] for i in range(config.text.vocab_size)])
    weights["head.weight"] *= factors[:, None]
    return weights


def draw(name: str, shape: tuple[int, ...], rules: tuple[Rule, ...], seed: int) -> Tensor:
    """A float32 tensor by the first rule that its name matches; it depends on name, rule and seed alone."""
    mean, spread, by_inputs = next(rule[1:] for rule in rules if fnmatch(name, rule[0]))
    values = generator(name, seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values * np.float32(spread / shape[-1] ** 0.5 if by_inputs else spread) + np.float32(mean))


def generator(name: str, seed: int) -> np.random.Generator:
    """A tensor's own source of random numbers."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))


def _row_kind(config: ModelConfig, tokenizer: Tokenizer, token_id: int) -> str:
    if token_id == config.eos_token_id:
        return "end"
    text = tokenizer.decode([token_id], skip_special_tokens=True)
    if not text:
        return "special"
    return "readable" if text.isprintable() and text.isascii() else "unreadable"
