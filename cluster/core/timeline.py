"""What happened to one request and when, as a value: for the demo's story, `explain`, spans and metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment. `detail` holds (name, value) pairs: tokens, bytes, microseconds, groups, reasons."""

    at_us: int
    what: str
    attempt: int
    detail: tuple[tuple[str, int | float | str], ...] = ()

    def get(self, name: str) -> int | float | str | None:
        """The detail of that name."""
        return dict(self.detail).get(name)


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """All marks of one request in order of time; every figure below is derived from them."""

    request_id: str
    prompt_tokens: int
    marks: tuple[Mark, ...]

    def first(self, what: str) -> Mark | None:
        """The earliest mark of that kind."""
        return next((mark for mark in self.marks if mark.what == what), None)

    def total(self, what: str, name: str) -> int:
        """Sum of one detail over all marks of a kind."""
        return sum(int(dict(mark.detail).get(name, 0)) for mark in self.marks if mark.what == what)

    @property
    def attempts(self) -> int:
        """How often the sequence was given to an engine."""
        return sum(mark.what == "submitted" for mark in self.marks)

    @property
    def route(self) -> tuple[str, ...]:
        """Names of the groups that computed, in order: prefill/0, decode/1, …"""
        return tuple(str(mark.get("group")) for mark in self.marks if mark.what in ("submitted", "admitted"))

    @property
    def ttft_us(self) -> int | None:
        """Arrival to first emitted token."""
        return self._between("arrived", "first token")

    @property
    def total_us(self) -> int | None:
        """Arrival to end."""
        return self._between("arrived", "ended")

    @property
    def chunks(self) -> int:
        """Prefill chunks computed, over all attempts."""
        return sum(mark.what == "chunk" for mark in self.marks)

    @property
    def grains_saved(self) -> int:
        """Grains of this request that reached the store."""
        return self.total("saved", "grains")

    @property
    def tokens_fetched(self) -> int:
        """Prompt tokens swapped in from the store instead of computed, over all attempts."""
        return self.total("prefill started", "hit_tokens")

    @property
    def handoff_bytes(self) -> int:
        """Bytes written from PROMPT to COMPLETION groups."""
        return self.total("admitted", "bytes")

    @property
    def handoff_us(self) -> int:
        """Time from the last chunk's end to admission as the COMPLETION engine measured it."""
        return self.total("admitted", "handoff_us")

    def _between(self, start: str, end: str) -> int | None:
        a, b = self.first(start), self.first(end)
        return b.at_us - a.at_us if a and b else None

    def lines(self) -> tuple[str, ...]:
        """The story, one line a mark: milliseconds since arrival, attempt, what, details."""
        start_us = self.marks[0].at_us if self.marks else 0
        return tuple(
            f"{(mark.at_us - start_us) / 1000:10.1f} ms  #{mark.attempt}  {mark.what:<16}"
            + "  ".join(f"{name}={value}" for name, value in mark.detail)
            for mark in self.marks
        )
