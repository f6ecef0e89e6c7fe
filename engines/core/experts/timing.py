"""When the experts are rearranged: every so many counted steps, the first time after a quarter of that."""

from dataclasses import dataclass
from enum import StrEnum


class Counting(StrEnum):
    """Which steps an engine counts.

    EVERY_STEP: PROMPT and COMPLETION engines. DECODE: a NORMAL engine; prefill steps are as if they had not been.
    AFTER_PREFILL: a NORMAL engine whose prefill steps are recorded and make the next decode step rearrange.
    """

    EVERY_STEP = "every_step"
    DECODE = "decode"
    AFTER_PREFILL = "after_prefill"


@dataclass(frozen=True, slots=True)
class TimingConfig:
    """Steps of a window and from one rearrangement to the next (0: never); raises ValueError for a longer window."""

    window: int = 100
    interval: int = 0
    counting: Counting = Counting.EVERY_STEP

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"interval = {self.interval} must not be negative; use 0 to keep the experts in place")
        if self.interval and not 0 < self.window <= self.interval:
            raise ValueError(
                f"window = {self.window} must be between 1 and interval = {self.interval}; use a shorter window"
            )


@dataclass(frozen=True, slots=True)
class Tick:
    """What one step means: whether its loads belong into the window, and whether a rearrangement follows it."""

    is_recorded: bool
    rearranges: bool


class Timing:
    """Counts the steps of one group. All ranks see the same steps, so all rearrange after the same one."""

    def __init__(self, config: TimingConfig, ranks: int) -> None:
        self._config = config
        self._is_off = not config.interval or ranks == 1
        self._counter = config.interval - max(1, config.interval // 4)

    def step(self, is_prefill: bool) -> Tick:
        """Count one step that was run."""
        if self._is_off:
            return Tick(False, False)
        if is_prefill and self._config.counting is Counting.DECODE:
            return Tick(False, False)
        if is_prefill and self._config.counting is Counting.AFTER_PREFILL:
            self._counter = self._config.interval - 1
            return Tick(True, False)
        self._counter += 1
        if self._counter < self._config.interval:
            return Tick(True, False)
        self._counter = 0
        return Tick(True, True)
