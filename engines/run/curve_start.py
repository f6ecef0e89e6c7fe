"""The step curve an engine starts with: read from a directory if this machine measured it lately, else measured now."""

import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from shoal.engines.config import EngineConfig
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.model.batch import Batch
from shoal.engines.run.bound import BoundModel
from shoal.engines.run.curve_cache import CurveCache, CurveKey
from shoal.engines.run.curve_measure import measure_curve

from shoal import __version__

logger = logging.getLogger(__name__)

# Fewer runs and sizes than of captured graphs, for an eager step takes as long as hundreds of replays. Its times lie on
# a line, nearly, so powers of four show it; the middle one of three runs counts.
TIMED_RUNS = 3
GROWTH = 4


@dataclass(frozen=True, slots=True)
class KeptCurves:
    """Where curves are kept, and the name of the weights they belong to (`model_revision`)."""

    directory: Path
    revision: str


def starting_curve(model: BoundModel, config: EngineConfig, kept: KeptCurves | None = None) -> StepCurve:
    """The curve of every step size that this engine can plan: `sequences_max` sequences of a row and `drafts`.

    Measured on the engine's own model and caches, which it writes: call it before there are sequences. Of engines that
    start together one measures, the others wait and read. A directory that cannot be used costs a measurement at each
    start, and the log says so.
    """
    began_s, rows_max = time.perf_counter(), config.sequences_max * (1 + config.drafts)
    sizes = measured_sizes(rows_max)
    if kept is None:
        how, curve = "measured", _measured(model, config, sizes)
    else:
        how, curve = _read_or_measured(model, config, sizes, kept)
    points = ", ".join(f"{size}: {ms:.1f}" for size, ms in zip(curve.sizes, curve.ms, strict=True))
    logger.info("step curve %s in %.2f s; ms by rows: %s", how, time.perf_counter() - began_s, points)
    return curve.of_every_row()


def step_clock() -> Callable[[], float]:
    """Seconds that a step computes. On one thread those of the processor, which other processes do not lengthen.

    Engines of one machine start together, and a curve whose large sizes were measured while others still load would
    say for an hour that drafts are dear.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def measured_sizes(rows_max: int) -> tuple[int, ...]:
    """Increasing sizes from 1 to `rows_max`, each but the last so many times the one before."""
    sizes = [1]
    while sizes[-1] * GROWTH < rows_max:
        sizes.append(sizes[-1] * GROWTH)
    return tuple(sizes) if rows_max == 1 else (*sizes, rows_max)


def _measured(model: BoundModel, config: EngineConfig, sizes: Sequence[int]) -> StepCurve:
    clock = step_clock()
    return measure_curve(sizes, lambda size: run_ms(model, config, size, clock), timed_runs=TIMED_RUNS)


def _read_or_measured(
    model: BoundModel, config: EngineConfig, sizes: Sequence[int], kept: KeptCurves
) -> tuple[str, StepCurve]:
    key, cache = curve_key(kept.revision, config, sizes), CurveCache(kept.directory)
    try:
        with _alone(kept.directory):
            if (curve := cache.read(key, int(time.time()))) is not None:
                return f"read from {kept.directory}", curve
            curve = _measured(model, config, sizes)
            cache.write(key, curve, int(time.time()))
            return "measured", curve
    except OSError as error:
        logger.warning("step curves cannot be kept in %s: %s", kept.directory, error)
        return "measured", _measured(model, config, sizes)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process at the latest."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def run_ms(model: BoundModel, config: EngineConfig, size: int, clock: Callable[[], float]) -> float:
    """Milliseconds of one forward of `size` rows with logits, by the sequences that a step of full drafts would have.

    Their ids are random, so that rows spread over experts as text does.
    """
    batch = made_up_batch(model, config, size)
    began_s = clock()
    model.logits(model.forward(batch))
    return 1e3 * (clock() - began_s)


def made_up_batch(model: BoundModel, config: EngineConfig, size: int) -> Batch:
    """A decode step of `size` rows behind one block of tokens, or as many as `max_model_len` has room for.

    As few sequences as hold so many rows: what one more row costs is the question, not what one more sequence does.
    All write the same blocks, and each its own slot.
    """
    each = 1 + config.drafts
    rows = [each] * (size // each) + ([size % each] if size % each else [])
    start = min(config.cache.block_tokens, max(0, config.max_model_len - each))
    blocks = tuple(range(1, 1 + blocks_needed(start + each, config.cache.block_tokens)))
    dice = torch.Generator().manual_seed(size)
    return Batch(
        token_ids=torch.randint(model.vocabulary, (size,), generator=dice),
        q_lens=tuple(rows),
        starts=(start,) * len(rows),
        block_tables=(blocks,) * len(rows),
        slots=tuple(range(1, 1 + len(rows))),
        data_lens=(start,) * len(rows),
        is_prefill=False,
        lookback=torch.randint(model.vocabulary, (len(rows), model.lookback), generator=dice),
        image_mask=torch.zeros(size, dtype=torch.bool),
        image_rows=torch.empty(0, model.hidden),
    )


def curve_key(revision: str, config: EngineConfig, sizes: Sequence[int]) -> CurveKey:
    """All that this process's curve depends on, its processor and torch among it."""
    return CurveKey(
        model=revision,
        sizes=tuple(sizes),
        dp=1,
        cp=1,
        ep=1,
        hardware=f"{processor()} x {os.cpu_count()}",
        versions=(
            ("shoal", __version__),
            ("torch", torch.__version__),
            ("instructions", torch.backends.cpu.get_cpu_capability()),
            ("threads", str(torch.get_num_threads())),
            ("block_tokens", str(config.cache.block_tokens)),
            ("rows a sequence", str(1 + config.drafts)),
        ),
    )


def processor() -> str:
    """The processor's name, as Linux or Python tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
