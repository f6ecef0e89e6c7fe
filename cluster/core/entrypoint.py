"""Life of one request as a state machine: match, encode, route, reserve, prefill, hand off, decode, end, re-route."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Limits of one request, microseconds. Every wait has one of these as its bound.

    `normal`: one NORMAL group prefills and decodes, there is no hand-off. `keep`: decoder rows computed at the prompt's
    end (truncation); 0 turns store hits off. `attempts_max` bounds how often a request is routed, `wait_us` how long it
    waits in all for room or a ready group, `progress_us` how long an attempt may be silent once submitted, `gap_us` how
    long a missing token may be missing, `ask_us` how long a call may take.
    """

    normal: bool = False
    keep: int = 0
    grain_tokens: int = 128
    match_us: int = 500_000
    ask_us: int = 10_000_000
    encode_us: int = 60_000_000
    progress_us: int = 60_000_000
    gap_us: int = 2_000_000
    wait_us: int = 30_000_000
    retry_us: int = 100_000
    attempts_max: int = 4
    encode_attempts_max: int = 3
    deadline_us: int = 600_000_000
