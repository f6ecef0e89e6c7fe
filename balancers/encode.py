"""Choose an encoder for one image: queued patches, and the encoder that already holds its embedding."""

from shoal.balancers.config import NO_GROUP, QUEUE, EncodeConfig
from shoal.balancers.reports import Choice, EncodeNeed, EncodeReport, Full, GroupRef, GroupScore
from shoal.balancers.reservations import Hold
from shoal.balancers.roster import Roster


class EncodeBalancer:
    """One owner, pure. An image being encoded counts as cached there: the encoder joins equal work (single flight)."""

    def __init__(self, config: EncodeConfig) -> None:
        self._config = config
        self._roster: Roster[EncodeReport] = Roster(width=1)
        self._held = self._roster.held
        self._coming: dict[str, tuple[GroupRef, bytes]] = {}

    @property
    def holds(self) -> int:
        """Reservations in force."""
        return len(self._held)

    def set_ready(self, groups: tuple[GroupRef, ...], now_us: int) -> None:
        """These encoders may be given work; others are forgotten with what was held there."""
        self._roster.set_ready(groups, now_us)
        self._tidy(now_us)

    def report(self, report: EncodeReport, now_us: int) -> None:
        """Take an encoder's own numbers; older ones and those of unknown lives are ignored."""
        self._roster.report(report, now_us)
        self._tidy(now_us)

    def release(self, reservation: str) -> None:
        """The room held for this reservation is not needed."""
        self._held.release(reservation)
        self._coming.pop(reservation, None)

    def choose(self, need: EncodeNeed, now_us: int) -> Choice | Full:
        """The encoder that can have the embedding first, held under `need.reservation`; or why there is none."""
        self.release(need.reservation)
        self._tidy(now_us)
        if not self._roster.loads:
            return Full(NO_GROUP, "no encoder is ready", 1_000_000)
        scores = tuple(self._score(group, need) for group in sorted(self._roster.loads))
        usable = [s for s in scores if not s.refused]
        if not usable:
            quickest = min(s.terms[0][1] for s in scores)
            reason = "; ".join(f"{s.group.name}: {s.refused}" for s in scores)
            return Full(QUEUE, reason, max(1_000_000, int(quickest)), scores)
        best = self._roster.best(usable, need.excluded)
        expires_us = now_us + self._config.reservation_us
        new_patches = 0 if self._has(best.group, need.digest) else need.patches
        self._coming[need.reservation] = (best.group, need.digest)
        return self._roster.choose(best, need.reservation, Hold(best.group, (new_patches,), expires_us), scores)

    def _has(self, group: GroupRef, digest: bytes) -> bool:
        report = self._roster.loads[group].report
        return (report is not None and digest in report.cached) or (group, digest) in self._coming.values()

    def _score(self, group: GroupRef, need: EncodeNeed) -> GroupScore:
        report = self._roster.loads[group].report
        held, held_patches = self._held.held(group)
        measured = report.patches_per_s if report else 0.0
        patch_us = 1e6 / (measured if measured > 0 else self._config.patches_per_s)
        waiting = held_patches + (report.waiting_patches if report else 0)
        saved = self._config.cached if self._has(group, need.digest) else 0.0
        own_us = need.patches * patch_us * (1.0 - saved)
        # A cached embedding is read without waiting for the queue, so the queue is saved in the same share.
        terms = (("queue", waiting * patch_us * (1.0 - saved)), ("encode", own_us))
        images = held + (report.waiting_images if report else 0)
        refused = ""
        if images >= self._config.queue_max and not saved:
            refused = f"{QUEUE}: {images} images wait, at most {self._config.queue_max}"
        return GroupScore(group, sum(cost for _, cost in terms), terms, refused)

    def _tidy(self, now_us: int) -> None:
        """Holds end by time; what was coming is forgotten with its hold (a report then speaks of it)."""
        self._held.expire(now_us)
        self._coming = {key: value for key, value in self._coming.items() if key in self._held}
