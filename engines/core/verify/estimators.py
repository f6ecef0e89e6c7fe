"""What steps really took, against the curve: running medians of the sampler's time and of the excess a row."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

from shoal.engines.core.verify.curve import StepCurve

SAMPLER_VALUES = 9
SAMPLER_VALUES_MIN = 5
FORWARD_VALUES = 5000
FORWARD_SIZE_VALUES_MIN = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of one decode step that replayed a captured graph of `graph_size` rows, with real sequences."""

    sequences: int
    graph_size: int
    forward_ms: float
    sampler_ms: float


class SamplerEstimator:
    """Median of the last 9 values once there are 5 (engine runtime notes 7.2). Milliseconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLER_VALUES)

    def feed(self, sampler_ms: float) -> None:
        """Take one value."""
        self._values.append(sampler_ms)

    def estimate(self) -> float | None:
        """The median, of an even count the mean of the two in the middle; None before the fifth value."""
        return median(self._values) if len(self._values) >= SAMPLER_VALUES_MIN else None


class ForwardEstimator:
    """Median over sizes of each size's median excess in milliseconds a row, within the last 5000 values of all sizes.

    Engine runtime notes 7.2. A size counts from its tenth value in the window. Feeding costs a move within the sorted
    values of one size; estimating is O(sizes) after a feed and O(1) otherwise.
    """

    def __init__(self) -> None:
        self._window: deque[tuple[int, float]] = deque()
        self._sorted: defaultdict[int, list[float]] = defaultdict(list)
        self._estimate: float | None = 0.0  # None = to be computed

    def feed(self, graph_size: int, excess_ms_per_row: float) -> None:
        """Take one value; the oldest leaves a full window."""
        self._window.append((graph_size, excess_ms_per_row))
        insort(self._sorted[graph_size], excess_ms_per_row)
        if len(self._window) > FORWARD_VALUES:
            size, value = self._window.popleft()
            values = self._sorted[size]
            del values[bisect_left(values, value)]
        self._estimate = None

    def estimate(self) -> float:
        """The median of medians, 0 while no size counts; may be negative."""
        if self._estimate is None:
            medians = [median(v) for v in self._sorted.values() if len(v) >= FORWARD_SIZE_VALUES_MIN]
            self._estimate = median(medians) if medians else 0.0
        return self._estimate


class StepEstimators:
    """Both estimates of one engine, fed after each processed decode step."""

    def __init__(self, curve: StepCurve) -> None:
        self._curve = curve
        self._forward = ForwardEstimator()
        self._sampler = SamplerEstimator()
        self._sampler_of: defaultdict[int, SamplerEstimator] = defaultdict(SamplerEstimator)

    def feed(self, times: StepTimes) -> None:
        """Take a step's times. Raises ValueError, with nothing taken, for a size beyond the curve."""
        expected_ms = self._curve.time_ms(times.graph_size)
        if expected_ms is None:
            raise ValueError(f"graph_size = {times.graph_size} is beyond the curve's {self._curve.rows_max}")
        self._forward.feed(times.graph_size, (times.forward_ms - expected_ms) / times.graph_size)
        self._sampler.feed(times.sampler_ms)
        self._sampler_of[times.sequences].feed(times.sampler_ms)

    def slope_ms(self) -> float:
        """What a row costs beyond the curve, never below 0."""
        return max(0.0, self._forward.estimate())

    def sampler_ms(self, sequences: int) -> float:
        """Sampling for so many sequences: their own estimate, else that of all counts, else 0."""
        own = self._sampler_of[sequences].estimate() if sequences in self._sampler_of else None
        if own is None:
            own = self._sampler.estimate()
        return 0.0 if own is None else own
