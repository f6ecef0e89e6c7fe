"""Choose a PROMPT (or NORMAL) group: predicted queue wait, uncached work, fetch, locality; room is held at once."""

from collections import OrderedDict

from shoal.balancers.config import DEADLINE, NO_GROUP, QUEUE, PrefillConfig
from shoal.balancers.reports import Choice, Full, GroupRef, GroupScore, PrefillNeed, PrefillReport
from shoal.balancers.reservations import Hold
from shoal.balancers.roster import Roster

PREFIXES_MAX = 4096  # remembered prefixes: 4096 x (16 B key + a set of names) stays below 2 MB


class PrefillBalancer:
    """One owner, pure: groups and reports in, choices out. Choices are held, so that two in a row do not herd."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._roster: Roster[PrefillReport] = Roster(width=1)
        self._held = self._roster.held
        self._served: OrderedDict[bytes, set[GroupRef]] = OrderedDict()

    @property
    def holds(self) -> int:
        """Reservations in force."""
        return len(self._held)

    def set_ready(self, groups: tuple[GroupRef, ...], now_us: int) -> None:
        """These groups may be given work; others are forgotten with what was held there."""
        self._roster.set_ready(groups, now_us)

    def report(self, report: PrefillReport, now_us: int) -> None:
        """Take a group's own numbers; older ones and those of unknown lives are ignored."""
        self._roster.report(report, now_us)

    def release(self, reservation: str) -> None:
        """The room held for this reservation is not needed."""
        self._held.release(reservation)

    def choose(self, need: PrefillNeed, now_us: int) -> Choice | Full:
        """The cheapest ready group whose queue has room, held under `need.reservation`; or why there is none."""
        self._held.expire(now_us)
        self._held.release(need.reservation)
        if not self._roster.loads:
            return Full(NO_GROUP, "no PROMPT group is ready", self._config.reservation_us // 10)
        scores = tuple(self._score(group, need, now_us) for group in sorted(self._roster.loads))
        usable = [s for s in scores if not s.refused]
        if not usable:
            return self._full(scores)
        best = self._roster.best(usable, need.excluded)
        expires_us = now_us + self._config.reservation_us
        self._remember(need.prefix, best.group)
        hold = Hold(best.group, (need.uncached_tokens,), expires_us)
        return self._roster.choose(best, need.reservation, hold, scores)

    def _score(self, group: GroupRef, need: PrefillNeed, now_us: int) -> GroupScore:
        config, report = self._config, self._roster.loads[group].report
        held_requests, held_tokens = self._held.held(group)
        waiting_requests = held_requests + (report.waiting_requests if report else 0)
        waiting_tokens = held_tokens + (report.waiting_tokens if report else 0)
        measured = report.tokens_per_s if report else 0.0
        token_us = 1e6 / (measured if measured > 0 else config.tokens_per_s)
        fetch_us = need.hit_tokens // config.grain_tokens * config.fetch_us_per_grain
        local = group in self._served.get(need.prefix, ()) if need.prefix else False
        terms = (
            ("queue", config.queue * waiting_tokens * token_us),
            ("compute", config.compute * need.uncached_tokens * token_us),
            ("fetch", config.fetch * fetch_us),
            ("locality", -config.locality * config.fetch * fetch_us if local else 0.0),
        )
        refused = ""
        if waiting_requests >= config.queue_max:
            refused = f"{QUEUE}: {waiting_requests} requests wait, at most {config.queue_max}"
        elif need.deadline_us:
            ready_us = now_us + int((waiting_tokens + need.uncached_tokens) * token_us + fetch_us)
            if ready_us > need.deadline_us:
                refused = f"{DEADLINE}: first token in {(ready_us - now_us) / 1e6:.3g} s"
        return GroupScore(group, sum(cost for _, cost in terms), terms, refused)

    def _full(self, scores: tuple[GroupScore, ...]) -> Full:
        """Every group refused: queue bounds count as overload only if no group has but the deadline against it."""
        quickest = min(scores, key=lambda s: s.terms[0][1])
        retry_after_us = max(1_000_000, int(quickest.terms[0][1]) // 2)
        code = DEADLINE if any(s.refused.startswith(DEADLINE) for s in scores) else QUEUE
        return Full(code, "; ".join(f"{s.group.name}: {s.refused}" for s in scores), retry_after_us, scores)

    def _remember(self, prefix: bytes, group: GroupRef) -> None:
        if not prefix:
            return
        self._served.setdefault(prefix, set()).add(group)
        self._served[prefix] &= set(self._roster.loads)
        self._served.move_to_end(prefix)
        if len(self._served) > PREFIXES_MAX:
            self._served.popitem(last=False)
