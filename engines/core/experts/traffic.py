"""Seeded expert loads for tests and benchmarks: Zipf-shaped popularity, topics that come and go, slow drift, chance."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """What the routers of all layers do; each layer has popularities of its own.

    `choices`: (token, expert) pairs a layer routes in one step, over all ranks. The k-th most popular expert is chosen
    in proportion to k^-`zipf`. `topics` kinds of work share the tokens; each multiplies an expert's popularity by
    exp(normal x `topic_spread`), and the logarithms of their shares vary with standard deviation `topic_swing` and
    are forgotten over about `topic_steps` steps, as the sequences of a batch are. From one window to the next the
    logarithm of every popularity moves by normal x `drift`, evenly over the window. Numbers of a step are Poisson
    draws.
    """

    layers: int
    experts: int
    choices: int
    zipf: float = 0.6
    topics: int = 16
    topic_spread: float = 0.4
    topic_swing: float = 0.3
    topic_steps: float = 200.0
    drift: float = 0.05


# Steps that share one set of rates: short against any topic, and cheap.
TURN_STEPS = 10


def windows(shape: TrafficShape, steps: int, seed: int) -> Iterator[NDArray[np.int32]]:
    """Consecutive windows without end, each int32 [steps, layers, experts] with the numbers of tokens received."""
    random = np.random.default_rng(seed)
    ranking = np.arange(1, shape.experts + 1) ** -shape.zipf
    popularity = np.log(np.stack([random.permutation(ranking) for _ in range(shape.layers)]))
    offsets = random.normal(0, shape.topic_spread, (shape.topics, shape.layers, shape.experts))
    mixture = random.normal(0, shape.topic_swing, shape.topics)
    keep = float(np.exp(-TURN_STEPS / shape.topic_steps))
    while True:
        loads = np.empty((steps, shape.layers, shape.experts), dtype=np.int32)
        moved = popularity + random.normal(0, shape.drift, popularity.shape)
        for first in range(0, steps, TURN_STEPS):
            share = np.exp(mixture) / np.exp(mixture).sum()
            base = popularity + (moved - popularity) * (first / steps)
            kinds = np.exp(base + offsets)
            kinds /= kinds.sum(-1, keepdims=True)
            rates = np.tensordot(share, kinds, 1) * shape.choices
            turn = loads[first : first + TURN_STEPS]
            turn[:] = random.poisson(rates, turn.shape)
            mixture = keep * mixture + random.normal(0, shape.topic_swing * (1 - keep**2) ** 0.5, shape.topics)
        popularity = moved
        yield loads
