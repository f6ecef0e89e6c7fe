"""Which groups exist, are ready, draining or lost: desired against actual, as a versioned view.

Pure: events and the time in, effects out. Whatever is supervised (engines, encoders, store nodes, balancers,
entrypoints) is a member of a role; one life of it is a GroupRef, and a new life has the next epoch. The same code
decides live and in simulation. A view's number grows with every change that anybody else has to know.

    wanted -> STARTING -> READY -> DRAINING -> gone
                 |          |         |
                 +----------+---------+--> LOST -- back-off --> STARTING (epoch + 1)
                                            +-- too many losses --> FAILED -- a quiet window --> STARTING
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.balancers.reports import GroupRef


class MemberState(StrEnum):
    """Where one member's current life stands."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Time limits in microseconds. A member silent for `lost_after_us` is lost, whatever else it may be doing.

    A member lost more than `restarts_max` times within `restarts_window_us` is FAILED: health is bad, and it is tried
    again only when a window has passed without it.
    """

    lost_after_us: int = 3_000_000
    start_timeout_us: int = 120_000_000
    drain_timeout_us: int = 600_000_000
    backoff_us: int = 200_000
    backoff_max_us: int = 10_000_000
    restarts_max: int = 5
    restarts_window_us: int = 60_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """One member as others see it."""

    group: GroupRef
    role: str
    state: MemberState


@dataclass(frozen=True, slots=True)
class View:
    """All members at one moment; a reader keeps the view with the greatest `number`."""

    number: int
    members: tuple[Member, ...] = ()

    def ready(self, role: str) -> tuple[GroupRef, ...]:
        """Groups of the role that may be given new work, by name."""
        return tuple(m.group for m in self.members if m.role == role and m.state is MemberState.READY)

    def alive(self) -> tuple[GroupRef, ...]:
        """Groups that may still do something: a GroupRef not in here is lost for whoever uses it."""
        return tuple(m.group for m in self.members if m.state in (MemberState.READY, MemberState.DRAINING))


@dataclass(frozen=True, slots=True)
class Health:
    """Whether everything that is wanted runs; `reasons` name what does not."""

    good: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Desire:
    """So many members of the role are wanted, named `<role>/<index>` from 0.

    Each `ranks` in a row are one group: they start together with one epoch, and what ends one ends all.
    """

    role: str
    count: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A member that runs already (the controller itself was restarted); it is adopted with its epoch."""

    group: GroupRef
    role: str


@dataclass(frozen=True, slots=True)
class Started:
    """This life is up: weights loaded, peers known, able to serve."""

    group: GroupRef


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """This life said something; any message from it counts."""

    group: GroupRef


@dataclass(frozen=True, slots=True)
class Died:
    """This life is known to be over (its process ended, a call said so), or its start failed."""

    group: GroupRef
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Give the member no new work and let it go when it is empty; another is started in its place if wanted."""

    name: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A draining life has nothing left to do."""

    group: GroupRef


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: sent when the last WakeAt is due."""


Event = Desire | Found | Started | Heartbeat | Died | Drain | Drained | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Create this life; answer Started or Died."""

    group: GroupRef
    role: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Make sure this life is over, by force; unknown or ended lives are fine."""

    group: GroupRef
    reason: str


@dataclass(frozen=True, slots=True)
class StartDraining:
    """Tell this life to take no new work and to report Drained when empty."""

    group: GroupRef


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell entrypoints, balancers and peers at once: drop everything that belongs to this life."""

    group: GroupRef
    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Hand the new view to balancers, entrypoints and engines."""

    view: View


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Tick at `at_us` unless a later WakeAt replaces it."""

    at_us: int


Effect = Start | Stop | StartDraining | Lost | Publish | WakeAt


@dataclass(slots=True)
class _Life:
    """One member's current life and its history of losses."""

    group: GroupRef
    role: str
    state: MemberState
    deadline_us: int
    losses_us: list[int] = field(default_factory=list)
    reason: str = ""
    is_empty: bool = False  # drained, while others of its group are not

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in (MemberState.LOST, MemberState.FAILED)

    def failed_often(self, config: MembershipConfig, now_us: int) -> bool:
        """Keeps only losses within the window; whether they are too many."""
        self.losses_us = [t for t in self.losses_us if now_us - t < config.restarts_window_us]
        return len(self.losses_us) > config.restarts_max


class Membership:
    """The controller's decisions. One task owns it; every method is total: a late or repeated event is harmless."""

    def __init__(self, config: MembershipConfig, first_epoch: int = 1) -> None:
        """`first_epoch` must exceed every epoch an earlier controller may have given out and Found will not report."""
        self._config = config
        self._first_epoch = first_epoch
        self._lives: dict[str, _Life] = {}
        self._desired: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._number = 0
        self._published: tuple[Member, ...] | None = None

    @property
    def desired(self) -> Mapping[str, int]:
        """Wanted members by role."""
        return dict(self._desired)

    def view(self) -> View:
        """The members now; its number is that of the last Publish."""
        members = (Member(life.group, life.role, life.state) for life in self._lives.values())
        return View(self._number, tuple(sorted(members, key=lambda m: (m.role, _index(m.group.name)))))

    def health(self) -> Health:
        """Bad while a member is FAILED or a role has fewer ready members than wanted."""
        reasons = [
            f"{name} is failed after repeated losses: {life.reason}"
            for name, life in sorted(self._lives.items())
            if life.state is MemberState.FAILED
        ]
        view = self.view()
        for role, count in sorted(self._desired.items()):
            ready = len(view.ready(role))
            if ready < count:
                reasons.append(f"{role}: {ready} of {count} ready")
        return Health(not reasons, tuple(reasons))

    def on(self, event: Event, now_us: int) -> tuple[Effect, ...]:
        """Take one event; returns what is to be done now and when to wake this core next."""
        effects: list[Effect] = []
        match event:
            case Desire(role, count, ranks):
                assert count % ranks == 0, f"{count} members of {role} are no whole groups of {ranks}"
                self._desired[role], self._ranks[role] = count, ranks
            case Found(group, role):
                self._adopt(group, role, now_us)
            case Started(group):
                if (life := self._current(group)) and life.state is MemberState.STARTING:
                    life.state, life.deadline_us = MemberState.READY, now_us + self._config.lost_after_us
            case Heartbeat(group):
                if (life := self._current(group)) and life.state is MemberState.READY:
                    life.deadline_us = now_us + self._config.lost_after_us
            case Died(group, reason):
                if life := self._current(group):
                    self._lose(life, reason, now_us, effects)
            case Drain(name):
                if life := self._lives.get(name):
                    self._drain(life, now_us, effects)
            case Drained(group):
                if (life := self._current(group)) and life.state is MemberState.DRAINING:
                    life.is_empty = True
                    if all(mate.is_empty for mate in self._mates(life)):
                        self._remove(life, "drained", effects)
        self._expire(now_us, effects)
        self._reconcile(now_us, effects)
        self._publish(effects)
        if deadlines := [life.deadline_us for life in self._lives.values()]:
            effects.append(WakeAt(min(deadlines)))
        return tuple(effects)

    def _current(self, group: GroupRef) -> _Life | None:
        """The life this event speaks of, or None if that life is over or unknown."""
        life = self._lives.get(group.name)
        return life if life and life.group == group and not life.has_ended else None

    def _names(self, role: str, index: int) -> list[str]:
        """Members of one group, by rank."""
        ranks = self._ranks.get(role, 1)
        first = index - index % ranks
        return [f"{role}/{i}" for i in range(first, first + ranks)]

    def _mates(self, life: _Life) -> list[_Life]:
        """The living others of its group."""
        lives = [self._lives.get(name) for name in self._names(life.role, _index(life.group.name))]
        return [mate for mate in lives if mate is not None and mate is not life and not mate.has_ended]

    def _adopt(self, group: GroupRef, role: str, now_us: int) -> None:
        if group.name in self._lives:
            return
        self._epochs[group.name] = max(group.epoch, self._epochs.get(group.name, 0))
        self._lives[group.name] = _Life(group, role, MemberState.READY, now_us + self._config.lost_after_us)

    def _drain(self, life: _Life, now_us: int, effects: list[Effect]) -> None:
        if life.state is MemberState.DRAINING:
            return
        group = (life, *self._mates(life))
        if any(rank.state is not MemberState.READY for rank in group):  # nothing of value runs there
            self._remove(life, "drained before it was ready", effects)
            return
        for rank in group:
            rank.state, rank.deadline_us = MemberState.DRAINING, now_us + self._config.drain_timeout_us
            effects.append(StartDraining(rank.group))

    def _remove(self, life: _Life, reason: str, effects: list[Effect]) -> None:
        for gone in (life, *self._mates(life)):
            del self._lives[gone.group.name]
            effects += [Stop(gone.group, reason), Lost(gone.group, gone.role, reason)]

    def _lose(self, life: _Life, reason: str, now_us: int, effects: list[Effect]) -> None:
        """A life is over against our will: force the end, tell everybody, start again after the back-off."""
        config = self._config
        effects += [Stop(life.group, reason), Lost(life.group, life.role, reason)]
        mates = self._mates(life)
        life.losses_us, life.reason = [*life.losses_us, now_us], reason
        if life.failed_often(config, now_us):
            life.state, life.deadline_us = MemberState.FAILED, now_us + config.restarts_window_us
        else:
            wait_us = min(config.backoff_max_us, config.backoff_us * 2 ** (len(life.losses_us) - 1))
            life.state, life.deadline_us = MemberState.LOST, now_us + wait_us
        for mate in mates:
            if not mate.has_ended:
                self._lose(mate, f"its group lost {life.group.name}: {reason}", now_us, effects)

    def _expire(self, now_us: int, effects: list[Effect]) -> None:
        for life in sorted(self._lives.values(), key=lambda x: x.group):
            if now_us < life.deadline_us or self._lives.get(life.group.name) is not life:
                continue
            if life.state is MemberState.STARTING:
                self._lose(life, f"not ready within {self._config.start_timeout_us / 1e6:g} s", now_us, effects)
            elif life.state is MemberState.READY:
                self._lose(life, f"silent for {self._config.lost_after_us / 1e6:g} s", now_us, effects)
            elif life.state is MemberState.DRAINING:
                self._remove(life, f"still busy after draining {self._config.drain_timeout_us / 1e6:g} s", effects)
            elif self._wanted(life):  # LOST or FAILED, and its back-off is over
                self._start(life.role, _index(life.group.name), now_us, effects)

    def _wanted(self, life: _Life) -> bool:
        return _index(life.group.name) < self._desired.get(life.role, 0)

    def _reconcile(self, now_us: int, effects: list[Effect]) -> None:
        """Start what is wanted and missing; drain what runs and is not wanted."""
        for role, count in sorted(self._desired.items()):
            for index in range(count):
                if f"{role}/{index}" not in self._lives:
                    self._start(role, index, now_us, effects)
        for life in sorted(self._lives.values(), key=lambda x: x.group):
            is_gone = self._lives.get(life.group.name) is not life  # with a mate
            if not is_gone and life.role in self._desired and not self._wanted(life):
                self._drain(life, now_us, effects)

    def _start(self, role: str, index: int, now_us: int, effects: list[Effect]) -> None:
        """Start a member, and with it its whole group, once the back-off of all its ranks is over."""
        names = self._names(role, index)
        lives = [life for name in names if (life := self._lives.get(name)) is not None]
        for life in lives:
            if not life.has_ended:  # found running without all of its group, which can never step
                self._lose(life, f"its group has no {role}/{index}", now_us, effects)
        due_us = max((life.deadline_us for life in lives), default=now_us)
        if now_us < due_us:
            for life in lives:
                life.deadline_us = due_us
            return
        epoch = max(self._first_epoch, 1 + max(self._epochs.get(name, 0) for name in names))
        deadline_us = now_us + self._config.start_timeout_us
        for name in names:
            group, losses_us = GroupRef(name, epoch), self._lives[name].losses_us if name in self._lives else []
            self._epochs[name] = epoch
            self._lives[name] = _Life(group, role, MemberState.STARTING, deadline_us, losses_us)
            effects.append(Start(group, role))

    def _publish(self, effects: list[Effect]) -> None:
        members = self.view().members
        if members != self._published:
            self._published = members
            self._number += 1
            effects.append(Publish(View(self._number, members)))


def _index(name: str) -> int:
    """The number in `<role>/<index>`."""
    role, _, index = name.rpartition("/")
    if not role or not index.isdecimal():
        raise ValueError(f"member name {name!r} must be <role>/<index>, for example decode/0")
    return int(index)
