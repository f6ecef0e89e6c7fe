"""What `determinism: full` costs: sampled answers with drafts judged by their draw, against by ratio and no drafts.

The built-in model answers its questions in one batch at each temperature, every question with a seed of its own;
decode steps alone are timed. By ratio most drafts are accepted; by their draw the answers are those without drafts.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from shoal.engines.config import CacheConfig, Determinism, EngineConfig, Role
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.plan import StepKind
from shoal.engines.core.request import EngineRequest, SamplingParams, TokensEvent
from shoal.engines.model.decoder import Model
from shoal.engines.model.errors import CheckpointError
from shoal.engines.run.load import build_engine, load_model
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.engine_bench import questions

OUTPUTS = 64
STEP_TOKENS_MAX = 512
ARMS = ((0, Determinism.BATCH_INVARIANT), (5, Determinism.BATCH_INVARIANT), (5, Determinism.FULL))


@dataclass(frozen=True, slots=True)
class Figure:
    """One arm at one temperature: tokens a sequence and step, tokens a second of decode, and how many answers are
    those of the engine without drafts."""

    temperature: float
    drafts: int
    determinism: Determinism
    length: float
    tokens_per_s: float
    unchanged: int


Answers = list[list[int]]


def measure(
    model: Model, prompts: Sequence[tuple[int, ...]], temperature: float, drafts: int, determinism: Determinism
) -> tuple[float, float, Answers]:
    """Tokens a sequence and step, tokens a second, and the answers."""
    length = max(map(len, prompts)) + OUTPUTS
    blocks = len(prompts) * blocks_needed(length + drafts, CacheConfig().block_tokens)
    config = EngineConfig(
        role=Role.NORMAL,
        max_model_len=length,
        step_tokens_max=max(STEP_TOKENS_MAX, len(prompts) * (1 + drafts)),
        sequences_max=len(prompts),
        cache=CacheConfig(blocks_count=2 * blocks + 2, slots_count=len(prompts) + 2),
        drafts=drafts,
        determinism=determinism,
    )
    engine, _ = build_engine(model, config)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature, seed=number, max_tokens=OUTPUTS, ignore_eos=True)
        engine.submit(EngineRequest(str(number), prompt, len(prompt), sampling), now_us=0)
    answers: Answers = [[] for _ in prompts]
    tokens = shares = 0
    wall_s = 0.0
    while engine.has_work:
        began = time.perf_counter()
        output = engine.step(now_us=0)
        took_s = time.perf_counter() - began
        told = [event for event in output.events if isinstance(event, TokensEvent)]
        for event in told:
            answers[int(event.request_id)] += event.token_ids
        if output.kind is StepKind.DECODE:
            tokens, shares = tokens + sum(len(event.token_ids) for event in told), shares + len(told)
            wall_s += took_s
    return tokens / shares, tokens / wall_s, answers


def lines_of(figures: Sequence[Figure]) -> list[str]:
    """A line a figure."""
    lines = ["temperature  drafts  determinism      tokens a step  tokens/s  as without drafts"]
    for f in figures:
        asked = f"{f.temperature:>11}  {f.drafts:>6}  {f.determinism:<15}"
        lines.append(f"{asked}  {f.length:>13.2f}  {f.tokens_per_s:>8.1f}  {f.unchanged:>17}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; 1 for a checkpoint that cannot be used, or answers of `full` that drafts changed."""
    parser = argparse.ArgumentParser(prog="determinism_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the built-in toy)")
    parser.add_argument("--questions", type=int, default=8, help="how many (default %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0], metavar="T")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.questions < 1:
        parser.error(f"--questions {asked.questions}: must be at least 1")
    torch.set_num_threads(asked.threads)
    try:
        model = load_model(asked.model or ensure_toy(), with_drafter=True)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"determinism_bench: {error}\n")
        return 1
    prompts = questions(asked.questions, seed=1)
    figures: list[Figure] = []
    for temperature in asked.temperatures:
        plain: Answers = []
        for drafts, determinism in ARMS:
            sys.stderr.write(f"temperature {temperature}, {drafts} drafts, {determinism}\n")
            length, rate, answers = measure(model, prompts, temperature, drafts, determinism)
            plain = plain or answers
            unchanged = sum(a == b for a, b in zip(answers, plain, strict=True))
            figures.append(Figure(temperature, drafts, determinism, length, rate, unchanged))
    if asked.json:
        sys.stdout.write(json.dumps({"bench": "determinism", "figures": [asdict(f) for f in figures]}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(lines_of(figures)) + "\n")
    changed = [f for f in figures if f.determinism is Determinism.FULL and f.unchanged < len(prompts)]
    for f in changed:
        sys.stderr.write(f"determinism_bench: drafts changed {len(prompts) - f.unchanged} answers of full\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
