"""A step of every kind changes what it should and nothing else, and a stopped run goes on where it was."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.decoder import Model
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tokenizer import toy_tokenizer
from shoal.engines.toy.training.__main__ import main
from shoal.engines.toy.training.course import COURSE
from shoal.engines.toy.training.examples import batches
from shoal.engines.toy.training.initial import initial_weights
from shoal.engines.toy.training.loop import Hooks, train
from shoal.engines.toy.training.packing import StepBatch
from shoal.engines.toy.training.stacks import Stacks
from shoal.engines.toy.training.stages import Stage, Trains
from shoal.engines.toy.training.state import Place, load_state, save_state, start
from shoal.engines.toy.training.step import Learner

TOKENS = 256
SILENT = Hooks(lambda line: None)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return toy_config(toy_tokenizer())


def small(trains: Trains) -> Stage:
    """One row of a stage that trains so."""
    stage = next(s for s in COURSE if s.trains is trains)
    return dataclasses.replace(stage, tokens=TOKENS, pack_rows=1, packs=1, steps=4, warm_up=0, mixture="short")


def repeated(config: ModelConfig, stage: Stage, times: int) -> Iterator[StepBatch]:
    batch = next(batches(config, stage, seed=3, workers=0))
    return iter([batch] * times)


def fresh(config: ModelConfig) -> Learner:
    return Learner(config, Stacks(config, initial_weights(config, 2), torch.device("cpu")))


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.stacks.parameters.items()}


@pytest.mark.parametrize("trains", list(Trains))
def test_a_stage_changes_its_own_weights_only(config: ModelConfig, trains: Trains) -> None:
    learner, stage = fresh(config), small(trains)
    before = snapshot(learner)
    train(learner, stage, repeated(config, stage, 1), 0, float("inf"), SILENT)
    changed = {n for n, p in learner.stacks.parameters.items() if not torch.equal(p, before[n])}
    drafter = {n for n in before if n.startswith("mtp.")}
    indexer = {n for n in before if ".indexer." in n}
    if trains is Trains.DRAFTER:
        assert changed <= drafter
        # Heads that start at zero hold back what lies behind them for one step.
        assert {"mtp.*.attn.wq_b.weight", "mtp.*.main_proj.weight", "mtp.*.markov_head.head.weight"} <= changed
    elif trains is Trains.INDEXER:
        biases = {n for n in changed if n.endswith(("gate.bias", "gate.bias_vl"))}
        assert changed - biases == indexer
    else:
        assert not changed & drafter
        assert {"embed.weight", "layers.*.attn.wq_b.weight", "layers.1.engram.embed.weight"} <= changed


def test_the_loss_of_a_repeated_batch_falls(config: ModelConfig) -> None:
    learner, stage = fresh(config), small(Trains.TRUNK)
    lines: list[str] = []
    train(learner, stage, repeated(config, stage, 4), 0, float("inf"), Hooks(lines.append))
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < first - 0.3


def test_a_stopped_run_goes_on_where_it_was(config: ModelConfig, tmp_path: Path) -> None:
    stage = small(Trains.TRUNK)
    through, halves = fresh(config), fresh(config)
    batch = list(repeated(config, stage, 1))
    train(through, stage, iter(batch * 2), 0, float("inf"), SILENT)
    done = train(halves, stage, iter(batch), 0, float("inf"), SILENT)
    save_state(tmp_path, halves.stacks, halves.optimiser.state, Place(0, done))
    resumed = Learner(config, Stacks(config, initial_weights(config, 9), torch.device("cpu")))
    resumed.optimiser.state, place = load_state(tmp_path, resumed.stacks, torch.device("cpu"))
    assert place == Place(0, 1)
    train(resumed, stage, iter(batch), place.step, float("inf"), SILENT)
    for name, value in snapshot(through).items():
        assert torch.allclose(value, resumed.stacks.parameters[name], atol=1e-5), name


def test_the_command_writes_a_checkpoint_that_is_served(config: ModelConfig, tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--stage", "index", "--steps", "1", "--device", "cpu", "--workers", "0"]
    assert main([*arguments, "--rows", "1"]) == 0
    model = Model.load(tmp_path / "checkpoint")
    assert model.drafter is not None
    again = start(config, 1, tmp_path / "checkpoint")
    stacks = Stacks(config, again, torch.device("cpu"))
    weights = stacks.step_weights()
    served = model.trunk.layers[3].attention.wq_b.weight
    assert torch.equal(weights["layers.3.attn.wq_b.weight"], served), "what was exported reads back as it is served"
