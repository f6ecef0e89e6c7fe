"""Experts that move between two processes are, byte for byte, what a fresh load of the new placement gives."""

import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch
from experts_peer import RANKS, SPARE, move_and_compare, wait_for_a_silent_peer
from shoal.engines.core.experts.placement import Placement, replica_index
from shoal.engines.model.decoder import Model
from shoal.engines.run.experts_move import ExpertBank, GateTables

DEADLINE_S = 120.0


def run_ranks(target: Callable[..., None], *arguments: object) -> None:
    """Run both ranks to their ends; a failure in one of them fails the test, a rank that hangs is ended."""
    deadline = monotonic() + DEADLINE_S
    context = torch.multiprocessing.spawn(target, arguments, nprocs=RANKS, join=False)
    assert context is not None
    try:
        while not context.join(timeout=max(deadline - monotonic(), 0.0)):  # false also when one of them has ended
            assert monotonic() < deadline, f"ranks are still running after {DEADLINE_S} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture(scope="module")
def whole(toy: Model) -> ExpertBank:
    layers = [layer.moe for layer in toy.trunk.layers]
    return ExpertBank(layers, Placement.start(len(layers), len(layers[0].experts), 0, 1), 0)


def test_moved_weights_equal_a_fresh_load(toy_dir: Path, whole: ExpertBank, tmp_path: Path) -> None:
    """Budgets: three experts, less than one, everything at once, one byte more than an expert."""
    size = whole.expert_bytes
    budgets = [3 * size, size // 3 + 1, 10**9, size + 1]
    run_ranks(move_and_compare, str(tmp_path / "store"), str(toy_dir), budgets, str(tmp_path / "told"))
    first, second = (json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(RANKS))
    assert first == second, "a layer changed after different steps"
    layers_changed = [sorted(layer for step in changed for layer in step) for changed in first]
    assert all(len(set(layers)) == len(layers) for layers in layers_changed), "a layer changed twice"
    assert len(layers_changed[0]) > 1
    assert layers_changed[3] == [1, 2]
    steps = [len(changed) for changed in first]
    assert steps[1] > steps[0] >= len(layers_changed[0]) + 1, "a smaller budget takes more steps"
    assert steps[2] == len(layers_changed[2]) + 1


def test_a_silent_peer_ends_the_wait(toy_dir: Path, tmp_path: Path) -> None:
    run_ranks(wait_for_a_silent_peer, str(tmp_path / "store"), str(toy_dir), str(tmp_path / "told"))
    message = (tmp_path / "told.0").read_text()
    assert message.startswith("rank 0: rank 1 did not ")
    assert "within 0.2 s; replace the group" in message


def test_the_bank_holds_what_was_loaded(toy: Model) -> None:
    layers = [layer.moe for layer in toy.trunk.layers]
    placement = Placement.start(len(layers), len(layers[0].experts), RANKS * SPARE, RANKS)
    for rank in range(RANKS):
        bank = ExpertBank(layers, placement, rank)
        for layer, weights in enumerate(layers):
            for place, expert in enumerate(placement.by_rank()[layer, rank].tolist()):
                held, given = bank.expert(layer, place), weights.experts[expert]
                assert torch.equal(held.gate_up.weight, given.gate_up.weight)
                assert torch.equal(held.down.weight, given.down.weight)
                assert held.gate_up.is_quantised == given.gate_up.is_quantised


def test_the_gate_chooses_places_as_the_core_says() -> None:
    placement = Placement.start(3, 6, 6, 4)
    tables = GateTables.of(placement)
    choice = torch.randint(0, 6, (50, 2), generator=torch.Generator().manual_seed(1))
    for layer in range(3):
        for ep_rank in range(4):
            places = tables.places_of(layer, choice, ep_rank).numpy()
            assert np.array_equal(placement.experts[layer][places], choice.numpy())
            counts = placement.counts[layer][choice.numpy()]
            nth = replica_index(ep_rank, np.arange(50)[:, None], counts)
            assert np.array_equal(places, placement.places[layer][choice.numpy(), nth])
