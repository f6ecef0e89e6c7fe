"""What an engine asks of the world around its scheduler: something that computes a step, and memory it can swap."""

from typing import Protocol

from shoal.engines.core.plan import Plan, StepResult
from shoal.engines.core.request import EngineRequest


class StepRunner(Protocol):
    """Computes one planned step. The live one runs a model; a fake one may hash prefixes."""

    def run(self, plan: Plan) -> StepResult:
        """Do the plan's copies, compute its rows and sample; blocks and slots hold the step's KV on return.

        What goes wrong with one request alone is reported in `StepResult.failed`; anything raised ends the engine.
        """
        ...

    def objection(self, request: EngineRequest) -> str:
        """Why no step could compute this request (an id outside the vocabulary), with the rule; "" if one can."""
        ...


class GrainMemory(Protocol):
    """Swap of one block (the payload of one grain) and of a slot's stored region (an anchor)."""

    def read_block(self, block: int) -> bytes:
        """A copy of one block's bytes."""
        ...

    def write_block(self, block: int, payload: bytes) -> None:
        """Fill one block; raises ValueError on a wrong length and then changes nothing."""
        ...

    def read_stored(self, slot: int, end: int) -> bytes:
        """A copy of the stored region of a slot whose sequence has computed exactly `end` tokens."""
        ...

    def write_stored(self, slot: int, payload: bytes) -> None:
        """Load a stored region and clear the rest of the slot; raises ValueError on a wrong length."""
        ...
