"""Measure one engine here: tokens per second with and without drafts, on questions that the built-in model knows.

Each batch of questions is prefilled, then decoded until all have ended; decode steps alone are timed. The same engine,
questions and answers without drafts are the peer, so the ratio is what drafts pay on this machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from shoal.engines.config import CacheConfig, EngineConfig, Role
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.plan import StepKind
from shoal.engines.core.request import EngineRequest, SamplingParams, TokensEvent
from shoal.engines.model.decoder import Model
from shoal.engines.model.errors import CheckpointError
from shoal.engines.run.load import build_engine, load_model
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.tasks import arithmetic, chat, copying, lexicon, schema, tools
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.mixture import examination_random

TASKS = (arithmetic, chat, copying, lexicon, schema, tools)
BATCHES = (1, 4, 16)
OUTPUTS_MAX = 160
STEP_TOKENS_MAX = 512


@dataclass(frozen=True, slots=True)
class Figure:
    """Decode of all questions, `sequences` at a time: tokens and steps, wall and processor seconds, tokens a sequence
    and step (1 without drafts)."""

    drafts: int
    sequences: int
    tokens: int
    steps: int
    wall_s: float
    processor_s: float
    length: float


def questions(count: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of examination questions of all tasks that need neither pictures nor long texts, in turn."""
    codec, prompts = Codec.of(), []
    for number in range(count):
        encoded = encode(TASKS[number % len(TASKS)].generate(examination_random(seed, number)), codec)
        # The last answer is what is asked for; earlier turns' are part of the prompt.
        end = len(encoded.answer)
        while end and encoded.answer[end - 1]:
            end -= 1
        prompts.append(tuple(int(i) for i in encoded.ids[:end]))
    return prompts


def measure(
    model: Model, prompts: Sequence[tuple[int, ...]], sequences: int, drafts: int
) -> tuple[Figure, list[list[int]]]:
    """Answer all prompts greedily in batches; what it cost, and the answers."""
    answers: list[list[int]] = []
    tokens = steps = shares = 0
    wall_s = processor_s = 0.0
    for first in range(0, len(prompts), sequences):
        batch = prompts[first : first + sequences]
        engine, _ = build_engine(model, config_for(batch, drafts))
        said: dict[str, list[int]] = {}
        for number, prompt in enumerate(batch):
            name = str(number)
            said[name] = []
            engine.submit(EngineRequest(name, prompt, len(prompt), SamplingParams(0.0, max_tokens=OUTPUTS_MAX)), 0)
        while engine.has_work:
            began, spent = time.perf_counter(), time.process_time()
            output = engine.step(0)
            told = [event for event in output.events if isinstance(event, TokensEvent)]
            for event in told:
                said[event.request_id] += event.token_ids
            if output.kind is StepKind.DECODE and told:
                wall_s += time.perf_counter() - began
                processor_s += time.process_time() - spent
                tokens, steps = tokens + sum(len(event.token_ids) for event in told), steps + 1
                shares += len(told)
        answers += [said[str(number)] for number in range(len(batch))]
    return Figure(drafts, sequences, tokens, steps, wall_s, processor_s, tokens / max(1, shares)), answers


def config_for(batch: Sequence[tuple[int, ...]], drafts: int) -> EngineConfig:
    """A NORMAL engine with room for the batch and all its answers."""
    length = max(map(len, batch)) + OUTPUTS_MAX
    each = blocks_needed(length + drafts, CacheConfig().block_tokens)
    return EngineConfig(
        role=Role.NORMAL,
        max_model_len=length,
        step_tokens_max=STEP_TOKENS_MAX,
        sequences_max=len(batch),
        # Twice the blocks, so that the last prompt is not stopped by the watermark.
        cache=CacheConfig(blocks_count=2 * each * len(batch) + 2, slots_count=len(batch) + 2),
        drafts=drafts,
    )


def lines_of(figures: Sequence[Figure]) -> list[str]:
    """A table of the figures; each with drafts also as a ratio to the one without."""
    plain = {f.sequences: f.tokens / f.wall_s for f in figures if not f.drafts}
    lines = ["sequences  drafts  tokens/s  against none  tokens a step  tokens/s of processor time"]
    for f in figures:
        rate = f.tokens / f.wall_s
        ratio = f"{rate / plain[f.sequences]:.2f} x" if f.drafts else ""
        shares = f"{f.sequences:9d}  {f.drafts:6d}  {rate:8.1f}  {ratio:>12}  {f.length:13.2f}"
        lines.append(f"{shares}  {f.tokens / f.processor_s:26.1f}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table, or JSON; 1 for a checkpoint that cannot be used, or answers that drafts changed."""
    parser = argparse.ArgumentParser(prog="engine_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the built-in toy)")
    parser.add_argument("--questions", type=int, default=16, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the questions (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.questions < 1:
        parser.error(f"--questions {asked.questions}: must be at least 1")
    torch.set_num_threads(asked.threads)
    try:
        model = load_model(asked.model or ensure_toy(), with_drafter=True)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"engine_bench: {error}\n")
        return 1
    prompts = questions(asked.questions, asked.seed)
    figures: list[Figure] = []
    changed = 0
    for sequences in (b for b in BATCHES if b <= len(prompts)):
        answers = []
        for drafts in (0, model.config.text.dspark_block_size):
            sys.stderr.write(f"{sequences} sequences, {drafts} drafts\n")
            figure, answered = measure(model, prompts, sequences, drafts)
            figures.append(figure)
            answers.append(answered)
        changed += answers[0] != answers[1]
    if asked.json:
        sys.stdout.write(json.dumps({"bench": "engine", "figures": [asdict(f) for f in figures]}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(lines_of(figures)) + "\n")
    if changed:
        sys.stderr.write(f"engine_bench: drafts changed answers of {changed} batches\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
