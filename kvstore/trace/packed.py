"""A trace in memory as arrays: times, lengths and every request's chain of grain ids, numbered without gaps."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a file: its time (us, from where its reader says), tokens and the ids of its blocks.

    `blocks` int64 [blocks], empty where the format has none; ids are those of the file.
    """

    time_us: int
    input_tokens: int
    output_tokens: int
    blocks: Ints
    model: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `grains` int32 [references] below `grains_max`; request i has those from starts[i].

    `traffic` int8 [requests]: class of each request, 0 unless whoever packed it says more. `sessions` int32.
    """

    name: str
    block_tokens: int
    times_us: Ints
    input_tokens: Ints
    output_tokens: Ints
    starts: Ints
    grains: npt.NDArray[np.int32]
    grains_max: int
    sessions: npt.NDArray[np.int32]
    is_composed: bool = False

    def __len__(self) -> int:
        return len(self.times_us)

    @property
    def span_us(self) -> int:
        """From the first request to the last."""
        return int(self.times_us[-1] - self.times_us[0]) if len(self) else 0

    def chains(self) -> list[npt.NDArray[np.int32]]:
        """A view of each request's ids."""
        bounds = self.starts.tolist()
        return [self.grains[first:last] for first, last in itertools.pairwise(bounds)]


def pack_requests(name: str, block_tokens: int, requests: Iterable[TraceRequest]) -> Trace:
    """Requests whose ids share one name space, in the order given; times must not fall."""
    kept = list(requests)
    blocks = [r.blocks for r in kept]
    flat = np.concatenate(blocks) if blocks else np.empty(0, np.int64)
    unique, dense = np.unique(flat, return_inverse=True)
    return _packed(name, block_tokens, kept, dense.astype(np.int32), len(unique), np.zeros(len(kept), np.int32))


def pack_sessions(
    name: str,
    block_tokens: int,
    sessions: Iterable[Sequence[TraceRequest]],
    starts_us: Sequence[int] | int,
    by_model: bool = False,
    is_composed: bool = False,
) -> Trace:
    """Sessions whose ids are their own, merged by (time, session, place). `starts_us`: one each, or the step.

    With `by_model` the same id under two models is two grains.
    """
    kept: list[TraceRequest] = []
    parts: list[npt.NDArray[np.int32]] = []
    times, owners = [], []
    grains = 0
    for number, session in enumerate(sessions):
        start_us = starts_us * number if isinstance(starts_us, int) else starts_us[number]
        dense, count = _dense(session, by_model)
        parts += [part + np.int32(grains) for part in dense]
        grains += count
        kept += session
        times += [start_us + r.time_us for r in session]
        owners += [number] * len(session)
    order = np.argsort(np.array(times, np.int64), kind="stable")  # kept is in (session, place) order already
    flat = np.concatenate([parts[at] for at in order]) if parts else np.empty(0, np.int32)
    placed = [kept[at] for at in order]
    owner = np.array(owners, np.int32)[order]
    when = np.array(times, np.int64)[order]
    return _packed(name, block_tokens, placed, flat, grains, owner, when, is_composed)


def _dense(session: Sequence[TraceRequest], by_model: bool) -> tuple[list[npt.NDArray[np.int32]], int]:
    """Ids of one session numbered from 0, a part a request, and how many there are."""
    models = sorted({r.model for r in session}) if by_model else [""]
    parts: dict[int, npt.NDArray[np.int32]] = {}
    count = 0
    for model in models:
        places = [at for at, r in enumerate(session) if not by_model or r.model == model]
        largest = max((int(session[at].blocks.max()) for at in places if len(session[at].blocks)), default=-1)
        number = np.zeros(largest + 1, np.int32)
        for at in places:
            number[session[at].blocks] = 1
        number = np.cumsum(number, dtype=np.int32) - np.int32(1)
        for at in places:
            parts[at] = number[session[at].blocks] + np.int32(count)
        count += int(number[-1]) + 1 if len(number) else 0
    return [parts[at] for at in range(len(session))], count


def _packed(
    name: str,
    block_tokens: int,
    kept: Sequence[TraceRequest],
    flat: npt.NDArray[np.int32],
    grains: int,
    owners: npt.NDArray[np.int32],
    times_us: Ints | None = None,
    is_composed: bool = False,
) -> Trace:
    counts = np.array([0, *(len(r.blocks) for r in kept)], np.int64)
    times = np.array([r.time_us for r in kept], np.int64) if times_us is None else times_us
    assert (np.diff(times) >= 0).all(), "times of a trace must not fall"
    lengths = (np.array([r.input_tokens for r in kept], np.int64), np.array([r.output_tokens for r in kept], np.int64))
    return Trace(name, block_tokens, times, *lengths, np.cumsum(counts), flat, grains, owners, is_composed)
