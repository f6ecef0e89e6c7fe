"""Choose a COMPLETION group: blocks, slots, places, and the predicted cost of a step after joining; room is held."""

from shoal.balancers.config import NO_GROUP, ROOM, TOO_LONG, DecodeConfig
from shoal.balancers.reports import Choice, DecodeNeed, DecodeReport, Full, GroupRef, GroupScore
from shoal.balancers.reservations import Hold
from shoal.balancers.roster import Roster


class DecodeBalancer:
    """One owner, pure. A group is used only once it has reported: room is a fact, not a guess."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._roster: Roster[DecodeReport] = Roster(width=2)  # blocks, tokens
        self._held = self._roster.held

    @property
    def holds(self) -> int:
        """Reservations in force."""
        return len(self._held)

    def set_ready(self, groups: tuple[GroupRef, ...], now_us: int) -> None:
        """These groups may be given work; others are forgotten with what was held there."""
        self._roster.set_ready(groups, now_us)

    def report(self, report: DecodeReport, now_us: int) -> None:
        """Take a group's own numbers; older ones and those of unknown lives are ignored."""
        self._roster.report(report, now_us)

    def release(self, reservation: str) -> None:
        """The room held for this reservation is not needed."""
        self._held.release(reservation)

    def choose(self, need: DecodeNeed, now_us: int) -> Choice | Full:
        """The group whose step costs least after joining, held under `need.reservation`; or why there is none."""
        self._held.expire(now_us)
        self._held.release(need.reservation)
        reported = {g: load.report for g, load in self._roster.loads.items() if load.report is not None}
        if not reported:
            return Full(NO_GROUP, "no COMPLETION group is ready", self._config.retry_us)
        if all(self._blocks(need.tokens_final) > r.blocks_total for r in reported.values()):
            most = max(r.blocks_total for r in reported.values()) * self._config.block_tokens
            return Full(TOO_LONG, f"{need.tokens_final} tokens at most; a group holds {most}", 0)
        scores = tuple(self._score(report, need) for _, report in sorted(reported.items()))
        usable = [s for s in scores if not s.refused]
        if not usable:
            reason = "; ".join(f"{s.group.name}: {s.refused}" for s in scores)
            return Full(ROOM, reason, self._config.retry_us, scores)
        best = self._roster.best(usable, need.excluded)
        expires_us = now_us + self._config.reservation_us
        hold = Hold(best.group, (self._blocks(need.tokens), need.tokens), expires_us)
        return self._roster.choose(best, need.reservation, hold, scores)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.block_tokens)

    def _curve(self, sequences: int, context_tokens: int) -> float:
        """Step time by the configured curve."""
        config = self._config
        return config.base_us + config.sequence_us * sequences + config.context_us * context_tokens

    def _score(self, report: DecodeReport, need: DecodeNeed) -> GroupScore:
        held, held_blocks, held_tokens = self._held.held(report.group)
        sequences, context = report.sequences + held, report.context_tokens + held_tokens
        blocks_free = report.blocks_free - held_blocks
        now_curve_us = self._curve(report.sequences, report.context_tokens)
        scale = report.step_us / now_curve_us if report.step_us > 0 and report.sequences > 0 else 1.0
        step_us = scale * self._curve(sequences + 1, context + need.tokens)
        used = report.blocks_total - blocks_free + self._blocks(need.tokens_final)
        terms = (("step", step_us), ("pressure", step_us * self._config.pressure * used / report.blocks_total))
        lacks = []
        if blocks_free < self._blocks(need.tokens):
            lacks.append(f"{self._blocks(need.tokens) - blocks_free} blocks")
        if report.slots_free - held < 1:
            lacks.append("a slot")
        if sequences >= report.sequences_max:
            lacks.append(f"a place (runs {sequences} of {report.sequences_max})")
        if self._blocks(need.tokens_final) > report.blocks_total:
            lacks.append("blocks for the longest answer, ever")
        refused = f"{ROOM}: lacks {', '.join(lacks)}" if lacks else ""
        return GroupScore(report.group, sum(cost for _, cost in terms), terms, refused)
