"""VerifyLengths: what a scheduler asks, each decode step, how many rows each sequence gets."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shoal.engines.config import VerifyMode
from shoal.engines.core.verify.allocation import Total, allocate, allocate_total
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.estimators import StepEstimators, StepTimes
from shoal.engines.core.verify.group import GroupTotal, Offer, offer, rank_total
from shoal.engines.core.verify.rates import Drafted, rate_queues


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How drafts are verified; `drafts` are made for each of at most `sequences_max` sequences a step.

    `curve` may be absent in VARLEN too: before it is measured everybody verifies all that it holds (engine runtime
    notes 7). Raises ValueError naming the field, the value and the rule.
    """

    mode: VerifyMode
    drafts: int
    sequences_max: int
    curve: StepCurve | None = None

    def __post_init__(self) -> None:
        """Check the fields together."""
        if self.drafts < 0:
            raise ValueError(f"drafts = {self.drafts} must be at least 0")
        if self.sequences_max < 1:
            raise ValueError(f"sequences_max = {self.sequences_max} must be at least 1")
        if self.mode is VerifyMode.VARLEN and not self.drafts:
            raise ValueError("verify = varlen chooses among drafts and drafts = 0; use full, or make drafts")
        if self.mode is VerifyMode.FULL and self.curve is not None:
            raise ValueError("verify = full needs no curve; use varlen, or leave the curve out")
        if self.curve is not None and self.curve.rows_max < self.sequences_max:
            raise ValueError(
                f"the curve ends at {self.curve.rows_max} rows and must reach sequences_max = {self.sequences_max}: "
                "every sequence of a step has a row"
            )


class VerifyLengths:
    """Rows of each sequence of a decode step; one a rank, used by the task that owns its scheduler."""

    def __init__(self, settings: VerifySettings) -> None:
        self.settings = settings
        self.last: Total | None = None  # why the last choice came out as it did; None where nothing was chosen
        self._agreed: GroupTotal | None = None
        self._estimators = None if settings.curve is None else StepEstimators(settings.curve)

    def feed(self, times: StepTimes) -> None:
        """Take the times of a decode step that was processed, replayed a graph and had real sequences.

        Raises ValueError for a graph size beyond the curve. Without a curve there is nothing to correct.
        """
        if self._estimators is not None:
            self._estimators.feed(times)

    def choose(self, sequences: Seq[Drafted]) -> list[int]:
        """Rows of each sequence, in order: its last token and 0..drafts of those it holds.

        Raises ValueError for more sequences than `sequences_max`, or rates that do not fit the drafts.
        """
        settings, curve = self.settings, self.settings.curve
        if len(sequences) > settings.sequences_max:
            raise ValueError(f"{len(sequences)} sequences exceed sequences_max = {settings.sequences_max}")
        self.last, agreed, self._agreed = None, self._agreed, None
        if curve is None or self._estimators is None or not sequences:
            return [1 + len(one.drafts) for one in sequences]
        queues = rate_queues(sequences, settings.drafts)
        times_ms = curve.times_ms(self._estimators.slope_ms(), self._estimators.sampler_ms(len(sequences)))
        if agreed is None:
            chosen = allocate(queues.size, queues.split, times_ms)
        else:
            # A sequence may have come since the offer; its row is not negotiable.
            total = rank_total(queues.size, max(agreed.size, len(sequences)))
            chosen = allocate_total(queues.size, queues.split, times_ms, total)
        self.last = chosen.total
        rows: list[int] = chosen.rows.tolist()
        return rows

    def offer(self, sequences: Seq[Drafted]) -> Offer | None:
        """What this rank would make of each size, for the group to agree on one; None where nothing is chosen.

        `sequences` are those of the step to come, as far as they are known; raises ValueError as `choose`.
        """
        curve = self.settings.curve
        if curve is None or self._estimators is None:
            return None
        rates = rate_queues(sequences, self.settings.drafts).size
        return offer(rates, curve, self._estimators.slope_ms(), self._estimators.sampler_ms(len(sequences)))

    def agree_on(self, total: GroupTotal) -> None:
        """The next choice, and that alone, fills the size that the group agreed on."""
        self._agreed = total

    def corrections(self, sequences: int) -> tuple[float, float]:
        """(milliseconds a row, of the sampler) that a step of so many sequences adds to the curve; 0 without one."""
        if self._estimators is None:
            return 0.0, 0.0
        return self._estimators.slope_ms(), self._estimators.sampler_ms(sequences)
