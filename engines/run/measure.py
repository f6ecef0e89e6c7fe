"""Measure one engine here: `python -m shoal.engines.run.measure [DIR]`. CPU seconds, so other load hardly counts."""

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from shoal.engines.config import EngineConfig, Role, Truncation, TruncationMode
from shoal.engines.core.plan import StepKind
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.run.engine import Engine
from shoal.engines.run.load import build_engine, load_model
from shoal.engines.toy.build import ensure_toy

OUTPUT_TOKENS = 40
WARM_UP_TOKENS = 64
# (sequences, prompt tokens) of each measured batch.
BATCHES = ((1, 300), (8, 300), (1, 2000), (1, 4000))


@dataclass(frozen=True, slots=True)
class Rates:
    """CPU seconds and rows of the prefill and decode steps of one batch."""

    prefill_rows: int
    prefill_s: float
    decode_rows: int
    decode_s: float

    def line(self) -> str:
        """Tokens a second of both kinds."""
        prefill, decode = self.prefill_rows / self.prefill_s, self.decode_rows / self.decode_s
        return f"prefill {prefill:.0f} tok/s, decode {decode:.1f} tok/s"


def measure(engine: Engine, dice: random.Random, sequences: int, prompt_tokens: int) -> Rates:
    """Run so many random greedy requests to their end."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for number in range(sequences):
        ids = tuple(dice.randrange(3, 900) for _ in range(prompt_tokens))
        engine.submit(EngineRequest(f"{prompt_tokens}-{number}", ids, prompt_tokens, params), now_us=0)
    rows, seconds = dict.fromkeys(StepKind, 0), dict.fromkeys(StepKind, 0.0)
    while engine.has_work:
        start = time.process_time()
        output = engine.step(now_us=0)
        if output.rows:
            seconds[output.kind] += time.process_time() - start
            rows[output.kind] += output.rows
    return Rates(rows[StepKind.PREFILL], seconds[StepKind.PREFILL], rows[StepKind.DECODE], seconds[StepKind.DECODE])


def main() -> None:
    """Print start-up, memory and rates of a NORMAL engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, help="checkpoint; default: the built-in toy")
    directory = parser.parse_args().directory or ensure_toy()
    process = psutil.Process()
    truncation = Truncation(TruncationMode.COMPACT)
    engine, _ = build_engine(load_model(directory), EngineConfig(Role.NORMAL, truncation=truncation))
    cpu = process.cpu_times()
    lines = [f"ready after {cpu.user + cpu.system:.2f} CPU s, {process.memory_info().rss >> 20} MiB resident"]
    dice = random.Random(1)
    measure(engine, dice, 1, WARM_UP_TOKENS)
    for sequences, prompt_tokens in BATCHES:
        rates = measure(engine, dice, sequences, prompt_tokens)
        lines.append(f"{sequences} x {prompt_tokens} tokens: {rates.line()}")
    lines.append(f"afterwards {process.memory_info().rss >> 20} MiB resident")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
