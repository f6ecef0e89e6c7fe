"""One rank of a group whose experts move: run as a process of its own by `test_experts_move`."""

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.policy import solve
from shoal.engines.core.experts.traffic import TrafficShape, windows
from shoal.engines.model.moe import MoeWeights
from shoal.engines.run.experts_move import ExpertBank, ExpertMoveError, ExpertMover
from shoal.engines.run.load import load_model
from shoal.engines.run.rank_group import GlooGroup, Meeting

RANKS, SPARE = 2, 2
WAIT_S = 60.0


def moe_layers(directory: str) -> list[MoeWeights]:
    """The experts' layers of the checkpoint's trunk."""
    return [layer.moe for layer in load_model(Path(directory)).trunk.layers]


def targets(layers: int, experts: int) -> list[Placement]:
    """Placements to go through: two solved ones, the start again, and one that changes two layers.

    Of these, layer 1 changes inside rank 0; in layer 2 the last rank receives expert 3 once, for its last two places.
    """
    start = Placement.start(layers, experts, RANKS * SPARE, RANKS)
    shape = TrafficShape(layers, experts, choices=2_000, zipf=1.2, drift=0.5, topics=2)
    first, second = (window for window, _ in zip(windows(shape, 25, seed=1), range(2), strict=False))
    one = solve(first, start)
    inside = np.array(start.experts)
    inside[1, [0, 1]] = inside[1, [1, 0]]
    inside[2, -2:] = 3
    return [one, solve(second, one), start, Placement.of(inside, RANKS, experts)]


def join(rank: int, rendezvous: str) -> GlooGroup:
    """The group of all ranks."""
    torch.set_num_threads(1)
    return GlooGroup(Meeting("", 0, rank, RANKS), dist.FileStore(rendezvous, RANKS), WAIT_S)


def move_and_compare(rank: int, rendezvous: str, directory: str, budgets: list[int], report: str) -> None:
    """Go through all targets; after every step the bank must equal a fresh load of the placement then in force."""
    group = join(rank, rendezvous)
    layers = moe_layers(directory)
    placement = Placement.start(len(layers), len(layers[0].experts), RANKS * SPARE, RANKS)
    bank, told = ExpertBank(layers, placement, rank), []
    address = bank.bytes.data_ptr()
    for budget, target in zip(budgets, targets(placement.layers, placement.expert_count), strict=True):
        mover = ExpertMover(bank, placement, group, budget, WAIT_S)
        expected_steps, changed = mover.begin(target), []
        while mover.is_moving:
            changed.append(mover.step())
            assert torch.equal(bank.bytes, ExpertBank(layers, mover.placement, rank).bytes), f"step {len(changed)}"
        placement = mover.placement
        assert np.array_equal(placement.experts, target.experts)
        assert np.array_equal(placement.places, target.places)
        assert len(changed) == expected_steps, f"{len(changed)} steps, {expected_steps} were announced"
        told.append(changed)
    assert bank.bytes.data_ptr() == address
    Path(f"{report}.{rank}").write_text(json.dumps(told))
    group.all_gather(torch.zeros(1))  # nobody leaves before all have what they were sent


def wait_for_a_silent_peer(rank: int, rendezvous: str, directory: str, report: str) -> None:
    """Rank 1 never takes a step; rank 0 must be told so, by name, instead of waiting for ever."""
    group = join(rank, rendezvous)
    layers = moe_layers(directory)
    start = Placement.start(len(layers), len(layers[0].experts), RANKS * SPARE, RANKS)
    mover = ExpertMover(ExpertBank(layers, start, rank), start, group, 10**9, wait_s=0.2)
    mover.begin(targets(start.layers, start.expert_count)[0])
    store = dist.FileStore(f"{rendezvous}.end", RANKS)
    if rank == 1:
        store.wait(["ended"], timedelta(seconds=WAIT_S))
        return
    mover.step()
    try:
        while mover.is_moving:
            mover.step()
    except ExpertMoveError as error:
        Path(f"{report}.0").write_text(str(error))
    store.set("ended", "1")
