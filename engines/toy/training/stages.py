"""The course: what is trained on which samples, for how long and how fast."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.engines.toy.training.network import Options


class Trains(StrEnum):
    """What a stage changes: all but the drafter, the indexers alone, or the drafter alone."""

    TRUNK = "trunk"
    INDEXER = "indexer"
    DRAFTER = "drafter"


DENSE = Options()


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the course.

    mixture: name in `tasks.mixture`; tokens of a row; rows of a pack (what one worker makes) and packs of a step;
    steps; rates of the first and the last step, linear between them, risen to over `warm_up` steps; pictures a pack
    may hold, for every batch of a stage has tensors of one shape.
    """

    name: str
    mixture: str
    tokens: int
    pack_rows: int
    packs: int
    steps: int
    rates: tuple[float, float]
    warm_up: int = 0
    options: Options = DENSE
    trains: Trains = Trains.TRUNK
    pictures_max: int = 10

    def rate(self, step: int) -> float:
        """The learning rate of a step of this stage."""
        first, last = self.rates
        rate = first + (last - first) * step / max(1, self.steps - 1)
        return rate * min(1.0, (step + 1) / max(1, self.warm_up))
