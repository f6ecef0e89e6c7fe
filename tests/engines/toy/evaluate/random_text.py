"""Questions of random tokens."""

import random

from shoal.engines.toy.evaluate.sitting import Question


def text(seed: int, length: int, outputs: int) -> Question:
    """A prompt of random tokens that are no special ones."""
    dice = random.Random(seed)
    return Question(tuple(dice.randrange(3, 900) for _ in range(length)), (), (), outputs)
