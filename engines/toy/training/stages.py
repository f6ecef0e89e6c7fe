"""The course: what is trained on which samples, for how long and how fast."""

from dataclasses import dataclass

from shoal.engines.toy.training.network import Options

MUON_ADAM_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the course.

    mixture: name in `tasks.mixture`; tokens of a row; rows of a pack (what one worker makes) and packs of a step;
    steps; rate from the first step to the last, linear after `warm_up` steps; drafter: train it instead of the trunk.
    """

    name: str
    mixture: str
    tokens: int
    pack_rows: int
    packs: int
    steps: int
    rates: tuple[float, float]
    warm_up: int = 0
    options: Options = Options()
    drafter: bool = False

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, padding included."""
        return self.tokens * self.pack_rows * self.packs

    def rate(self, step: int) -> float:
        """The learning rate of a step of this stage."""
        first, last = self.rates
        rate = first + (last - first) * step / max(1, self.steps - 1)
        return rate * min(1.0, (step + 1) / max(1, self.warm_up))
