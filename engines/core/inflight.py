"""How many tokens the open steps of a sequence may still produce, for reserving memory ahead of their results."""

from dataclasses import dataclass


@dataclass(slots=True)
class InFlight:
    """`total` tokens may come from open steps, `last` of them from the one started last (notes 1.4)."""

    total: int = 0
    last: int = 0

    def start(self, tokens: int) -> None:
        """Open a step that may produce up to `tokens`."""
        self.total += tokens
        self.last = tokens

    def finish(self) -> None:
        """Close the oldest open step: what remains is the step started last, or nothing if that was it."""
        if self.total == self.last:
            self.total = self.last = 0
        else:
            self.total = self.last
