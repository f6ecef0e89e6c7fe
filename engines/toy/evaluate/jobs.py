"""The examination as jobs of a few questions each, done by several processes of one thread."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from shoal.engines.model.errors import CheckpointError
from shoal.engines.model.numerics import Mode
from shoal.engines.toy.evaluate.drafting import Answered
from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.evaluate.papers import DRAFT_PERCENT, DRAFTS, LOSS_PERCENT, chosen
from shoal.engines.toy.evaluate.room import Room


@dataclass(frozen=True, slots=True)
class Settings:
    """What is examined: checkpoint directory and numeric mode, seed and number of samples, names in `only` (empty:
    all), whether losses are tried, and how many processes work."""

    directory: Path
    mode: Mode = Mode.N1
    seed: int = 1
    samples: int = 100
    only: tuple[str, ...] = ()
    with_losses: bool = True
    workers: int = 2


@dataclass(frozen=True, slots=True)
class Job:
    """Questions of a paper, by index: answered by the engine (under a loss or not), or with drafts."""

    paper: str
    indices: tuple[int, ...]
    loss: Loss | None = None
    is_drafting: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One question's answer: its index, how it was judged, and the tokens put out."""

    index: int
    is_right: bool
    is_valid: bool
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished job. `attempts` of an engine; or, with drafts, each question's answer, greedy and sampled."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    greedy: tuple[Answered, ...] = ()
    sampled: tuple[Answered, ...] = ()


def jobs(settings: Settings) -> tuple[Job, ...]:
    """All jobs of an examination, the longest first."""
    found: list[Job] = []
    papers = chosen(settings.only)
    is_only_drafts = set(settings.only) == {DRAFTS}
    for paper in papers:
        count = paper.count(settings.samples)
        if not is_only_drafts:
            found += [Job(paper.name, part) for part in _parts(count, paper.batch)]
        if settings.with_losses and not is_only_drafts:
            some = max(1, count * LOSS_PERCENT // 100)
            found += [Job(paper.name, part, loss) for loss in paper.losses for part in _parts(some, paper.batch)]
        if paper.is_mixed and (not settings.only or DRAFTS in settings.only):
            some = max(1, settings.samples * DRAFT_PERCENT // 100)
            found += [Job(paper.name, part, is_drafting=True) for part in _parts(some, paper.batch)]
    sizes = {paper.name: paper.batch for paper in papers}
    return tuple(sorted(found, key=lambda job: sizes[job.paper]))  # a small batch means long prompts


def run(settings: Settings, work: Sequence[Job]) -> Iterator[Outcome]:
    """Outcomes as they come, in any order. With one worker everything happens in this process.

    Raises CheckpointError for a directory that cannot be served.
    """
    if settings.workers == 1:
        room = Room.open(settings.directory, settings.mode)
        yield from (perform(room, settings.seed, job) for job in work)
        return
    # Forked children of a process that has used torch's threads may hang, so they start afresh.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.workers, context, initializer=_one_thread) as pool:
        done = [pool.submit(partial(_perform_there, settings.directory, settings.mode, settings.seed), j) for j in work]
        try:
            for future in as_completed(done):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def perform(room: Room, seed: int, job: Job) -> Outcome:
    """Do one job."""
    samples = room.samples(job.paper, seed, job.indices)
    if job.is_drafting:
        greedy, sampled = room.draft(samples, seed, job.indices)
        return Outcome(job, greedy=greedy, sampled=sampled)
    outputs = room.answer(samples, job.loss)
    judged = zip(job.indices, samples, outputs, strict=True)
    return Outcome(job, tuple(Attempt(i, *room.judge(sample, output), output) for i, sample, output in judged))


def _parts(count: int, size: int) -> list[tuple[int, ...]]:
    """0 … count - 1 in parts of at most `size`, equally long but for one."""
    parts = -(-count // size)
    return [tuple(range(count * i // parts, count * (i + 1) // parts)) for i in range(parts)]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _perform_there(directory: Path, mode: Mode, seed: int, job: Job) -> Outcome:
    try:
        room = Room.open(directory, mode)
    except CheckpointError as error:
        # Some of its kinds are made of several values and cannot be sent to another process; their text can.
        raise CheckpointError(str(error)) from None
    return perform(room, seed, job)
