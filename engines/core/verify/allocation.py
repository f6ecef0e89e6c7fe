"""How many rows a decode step verifies, and whose: the greedy that maximises accepted tokens a second."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.verify.curve import Floats

Ints = NDArray[np.int64]


class Total(NamedTuple):
    """The rows a step should have, and why: `tokens` expected from it, in `time_ms`."""

    rows: int
    tokens: float
    time_ms: float


def choose_total(rates: Floats, times_ms: Floats) -> Total:
    """The number of rows with most expected tokens a millisecond (engine runtime notes 7.4); the smaller if equal.

    rates [sequences, drafts], below 0 where there is no draft; times_ms [rows_max + 1], the time of a step of so many
    rows, as `StepCurve.times_ms`. Every sequence has one row at least, so raises ValueError if `rows_max` is less.
    O(entries log entries): entries are taken best first, and a row's rates never rise, so it is always a prefix of
    its drafts that is taken.
    """
    count = len(rates)
    if not 1 <= count < len(times_ms):
        raise ValueError(f"{count} sequences in a step: the curve covers 1 to {len(times_ms) - 1} rows")
    queue = np.negative(rates.ravel())
    queue.sort()
    held = int(queue.searchsorted(0.0, side="right"))  # those with a draft come first
    places = min(held, len(times_ms) - 1 - count)
    tokens = np.empty(places + 1)
    tokens[0] = count
    np.negative(queue[:places], out=tokens[1:])
    tokens.cumsum(out=tokens)
    best = int((tokens / times_ms[count : count + places + 1]).argmax())
    return Total(count + best, float(tokens[best]), float(times_ms[count + best]))


def split_places(rates: NDArray[np.floating], places: int) -> Ints:
    """How many of `places` each row of rates [sequences, drafts] gets: its entries among the best so many.

    Equal rates go to the lower flat index, sequence by sequence. Entries below 0 hold no draft and come last; sums
    to min(places, entries).
    """
    count = len(rates)
    if places <= 0 or not rates.size:
        return np.zeros(count, np.int64)
    if places >= rates.size:
        return np.full(count, rates.shape[1], np.int64)
    flat = rates.ravel()
    least = np.partition(flat, len(flat) - places)[len(flat) - places]
    taken = flat >= least
    excess = int(np.count_nonzero(taken)) - places
    if excess:
        taken[np.flatnonzero(flat == least)[-excess:]] = False
    rows = np.zeros(count, np.int64)
    for column in taken.reshape(rates.shape).T:  # a handful of adds; a sum along so short an axis costs four times that
        rows += column
    return rows


class Allocation(NamedTuple):
    """Rows of each sequence, summing to `total.rows`."""

    rows: Ints
    total: Total


def allocate(size_rates: Floats, split_rates: Floats, times_ms: Floats) -> Allocation:
    """Choose the total by `size_rates` and give it out by `split_rates`, both [sequences, drafts] with equal holes."""
    total = choose_total(size_rates, times_ms)
    return Allocation(split_places(split_rates, total.rows - len(split_rates)) + 1, total)


def allocate_total(size_rates: Floats, split_rates: Floats, times_ms: Floats, rows: int) -> Allocation:
    """Give out `rows` that were decided elsewhere, within the curve: at least one a sequence."""
    best = np.sort(size_rates, axis=None)[::-1][: rows - len(size_rates)]
    total = Total(rows, len(size_rates) + float(best.sum()), float(times_ms[rows]))
    return Allocation(split_places(split_rates, rows - len(split_rates)) + 1, total)
