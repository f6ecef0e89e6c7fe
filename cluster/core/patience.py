"""How long one request still waits, and for what: its deadline, room, an engine's word, a missing token."""

from shoal.cluster.core.policy import RequestPolicy

_PAUSES_DOUBLED = 4  # pauses grow from retry_us to 16 times that


class Patience:
    """Times of one request, microseconds; 0 means "not waiting for that"."""

    def __init__(self, policy: RequestPolicy) -> None:
        self._policy = policy
        self._pauses = 0
        self._room_since_us = 0
        self.deadline_us = 0
        self.retry_at_us = 0
        self.silent_at_us = 0
        self.gap_at_us = 0

    def begin(self, asked_deadline_us: int, now_us: int) -> None:
        """The request's own deadline, never beyond the policy's."""
        limit_us = now_us + self._policy.deadline_us
        self.deadline_us = min(asked_deadline_us, limit_us) if asked_deadline_us else limit_us

    @property
    def waits_for_room(self) -> bool:
        """Room has been refused since the sequence was last given to an engine."""
        return self._room_since_us > 0

    def start_room(self, now_us: int) -> None:
        """From now on the wait for room is counted, unless it already is."""
        self._room_since_us = self._room_since_us or now_us

    def pause(self, retry_after_us: int, now_us: int, is_absent: bool) -> bool:
        """Set `retry_at_us`, later each time; False when the wait for room (or for an absent group) is over."""
        self.start_room(now_us)
        until_us = self._room_since_us + (self._policy.absent_us if is_absent else self._policy.wait_us)
        if now_us >= until_us:
            return False
        most_us = self._policy.retry_us << min(self._pauses, _PAUSES_DOUBLED)
        pause_us = min(max(retry_after_us, self._policy.retry_us), most_us)
        self.retry_at_us = min(now_us + pause_us, until_us)
        self._pauses += 1
        return True

    def resume(self) -> None:
        """The pause is over; the wait for room goes on until an engine has the sequence."""
        self.retry_at_us = 0

    def at_engine(self, now_us: int) -> None:
        """An engine has the sequence: the wait for room has ended well."""
        self._room_since_us = self.retry_at_us = self._pauses = 0
        self.heard(now_us)

    def heard(self, now_us: int) -> None:
        """The engine said something about this sequence."""
        self.silent_at_us = now_us + self._policy.progress_us

    def gap(self, is_open: bool, now_us: int) -> None:
        """Something in between is missing (or no longer)."""
        if not is_open:
            self.gap_at_us = 0
        elif not self.gap_at_us:
            self.gap_at_us = now_us + self._policy.gap_us

    def complaint(self, output_count: int, now_us: int) -> str:
        """Why the engine is not to be waited for any longer; empty while it is."""
        if now_us >= self.silent_at_us:
            return f"no word of it for {self._policy.progress_us / 1e6:g} s"
        if self.gap_at_us and now_us >= self.gap_at_us:
            return f"token {output_count} or the end did not come in {self._policy.gap_us / 1e6:g} s"
        return ""

    def leave_engine(self) -> None:
        """No engine has the sequence, and no pause runs."""
        self.silent_at_us = self.gap_at_us = self.retry_at_us = 0

    def next_us(self, *others: int) -> int:
        """The earliest time something is due."""
        times = (self.deadline_us, self.retry_at_us, self.silent_at_us, self.gap_at_us, *others)
        return min((t for t in times if t), default=0)
