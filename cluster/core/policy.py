"""Limits of one request: every wait of the request machine is bounded by one of these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Microseconds, counts, tokens.

    `normal`: one NORMAL group prefills and decodes, there is no hand-off. `keep`: decoder rows computed at the prompt's
    end (truncation); 0 turns the store off. `attempts_max` bounds how often engines may fail a request. `wait_us` is
    how long it waits for room each time, `absent_us` how long for a ready group if no engine has failed it yet,
    `progress_us` how long an engine may be silent about it, `gap_us` how long a token or an end may be missing;
    `ask_us`, `match_us` and `encode_us` how long a call may take.
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
    absent_us: int = 10_000_000
    retry_us: int = 100_000
    attempts_max: int = 4
    encode_attempts_max: int = 3
    deadline_us: int = 600_000_000
