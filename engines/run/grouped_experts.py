"""Experts of the trunk shared out over the ranks of a group: rows travel to their experts and back, layer by layer.

Every rank computes attention for its own sequences and the experts it holds for everybody's. A row's parts are summed
by the rank that owns the row, in the order of experts, so its sum is to the bit what one rank alone computes: how many
ranks there are, and what the others run, changes no answer.
"""

import dataclasses

import torch
from shoal.engines.core.experts.placement import REPLICA_STRIDE, Placement, extra_places
from shoal.engines.model.decoder import Model
from shoal.engines.model.moe import MoeWeights, Routing, run_experts
from shoal.engines.model.numerics import Numerics
from shoal.engines.run.experts_move import ExpertBank, GateTables
from shoal.engines.run.rank_group import Collectives
from torch import Tensor


class GroupedExperts:
    """ExpertsPort of one rank. All ranks go through all layers of the trunk in order, with rows or without."""

    def __init__(self, group: Collectives, bank: ExpertBank, placement: Placement, limit: float) -> None:
        assert placement.ranks == group.size, f"a placement for {placement.ranks} ranks in a group of {group.size}"
        self._group, self._bank, self._limit = group, bank, limit
        self._size, self._layers = placement.size, placement.layers
        self._tables = GateTables.of(placement)

    def run(
        self, layer: int, numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float
    ) -> Tensor:
        """See ExpertsPort."""
        flat = routing.choice.flatten()
        order = torch.argsort(flat, stable=True)
        rows = order.div(routing.choice.shape[1], rounding_mode="floor")
        places = self._places(layer, flat[order], rows)
        travel = torch.argsort(places, stable=True)  # by rank, and by expert within one
        parts = self._compute(
            layer, numerics, x[rows[travel]], places[travel], routing.weights.flatten()[order[travel]]
        )
        routed = torch.empty_like(parts)
        routed[travel] = parts
        shared = run_experts(numerics, x, (weights.shared,), (len(x),), x.new_empty(0), limit)
        return numerics.round_(shared.index_add_(0, rows, routed))

    def join(self, numerics: Numerics, hidden: int) -> None:
        """See ExpertsPort."""
        nothing, nowhere = torch.empty(0, hidden, dtype=numerics.wide), torch.empty(0, dtype=torch.int64)
        for layer in range(self._layers):
            self._compute(layer, numerics, nothing, nowhere, nothing[:, 0])

    def _places(self, layer: int, experts: Tensor, rows: Tensor) -> Tensor:
        """The place of each pair's expert; replicas take turns by row (published gate kernel)."""
        replica = (self._group.rank + rows * REPLICA_STRIDE) % self._tables.counts[layer, experts]
        return self._tables.places[layer, experts, replica]

    def _compute(self, layer: int, numerics: Numerics, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Outputs [pairs, H] of pairs in ascending order of places, computed where their experts are."""
        ranks = self._group.size
        sent = torch.bincount(places.div(self._size, rounding_mode="floor"), minlength=ranks)
        matrix = self._group.all_gather(sent)
        received, outgoing = matrix[:, self._group.rank].tolist(), sent.tolist()
        # A place is a small number, exact in any float: it travels beside its row and weight.
        load = torch.cat((x, weights.unsqueeze(1).to(x.dtype), places.unsqueeze(1).to(x.dtype)), dim=1)
        arrived = self._group.exchange(load, outgoing, received)
        local = arrived[:, -1].to(torch.int64) - self._group.rank * self._size
        order = torch.argsort(local, stable=True)
        ready = arrived[order]
        outputs = torch.empty_like(arrived[:, :-2])
        if len(ready):
            sizes = torch.bincount(local, minlength=self._size).tolist()
            experts = [self._bank.expert(layer, place) for place in range(self._size)]
            outputs[order] = run_experts(
                numerics, ready[:, :-2].contiguous(), experts, sizes, ready[:, -2].contiguous(), self._limit
            )
        return self._group.exchange(outputs, received, outgoing)


def share_experts(model: Model, group: Collectives, extra: int = 0) -> Model:
    """The model of one rank of a group, which keeps its own share of the trunk's experts and no others.

    At least `extra` places hold copies, more where all would not divide evenly over the ranks. Raises ValueError if
    there are more ranks than places without two copies on one rank.
    """
    layers = model.trunk.layers
    experts = len(layers[0].moe.experts)
    placement = Placement.start(len(layers), experts, extra_places(experts, extra, group.size), group.size)
    bank = ExpertBank([layer.moe for layer in layers], placement, group.rank)
    without = tuple(dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, experts=())) for layer in layers)
    grouped = GroupedExperts(group, bank, placement, model.config.text.swiglu_limit)
    return dataclasses.replace(model, trunk=dataclasses.replace(model.trunk, layers=without), experts=grouped)
