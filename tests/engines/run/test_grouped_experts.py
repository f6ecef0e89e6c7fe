"""Ranks that share out experts and step together answer as one rank does, to the bit."""

import dataclasses
import threading

import pytest
import torch
from engine_world import Rank, World
from rank_threads import WAIT_S, together
from shoal.engines.config import Role
from shoal.engines.core.experts.timing import TimingConfig
from shoal.engines.core.plan import Ballot
from shoal.engines.core.request import FinishReason, SamplingParams
from shoal.engines.model.decoder import Model
from shoal.engines.model.moe import MoeRules, route, run_moe
from shoal.engines.run.expert_balance import BalanceConfig, ExpertBalance
from shoal.engines.run.group_steps import GroupSteps, from_row, to_row
from shoal.engines.run.grouped_experts import share_experts
from shoal.engines.run.rank_group import GlooGroup, GroupBrokenError

GRAIN, KEEP = 16, 24


@pytest.mark.parametrize(("size", "extra"), [(2, 0), (4, 0), (2, 2)])
def test_every_row_gets_the_sum_that_one_rank_gives_it(narrow: Model, size: int, extra: int) -> None:
    """Uneven batches, and none at all; with copies of experts, whichever of them is asked."""
    numerics, text = narrow.numerics, narrow.config.text
    rules = MoeRules(text.num_experts_per_tok, text.routed_scaling_factor, text.swiglu_limit)
    counts = [(5, 0, 1, 17), (0, 3, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)]
    layers = narrow.trunk.layers

    def batch(round_: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * round_ + rank)
        return numerics.round_(
            torch.randn(counts[round_][rank], narrow.config.hidden, generator=generator, dtype=numerics.wide)
        )

    @torch.inference_mode()
    def work(group: GlooGroup) -> list[torch.Tensor]:
        model = share_experts(narrow, group, extra).model
        found = []
        for round_ in range(len(counts)):
            x = batch(round_, group.rank)
            if not len(x):
                model.join()
            for layer in range(len(layers)) if len(x) else ():
                routing = route(x, layers[layer].moe, torch.zeros(len(x), dtype=torch.bool), rules)
                weights = model.trunk.layers[layer].moe
                assert weights.experts == ()
                found.append(model.experts.run(layer, numerics, x, weights, routing, rules.limit))
        return found

    for rank, found in enumerate(together(size, work)):
        alone = []
        for round_ in range(len(counts)):
            x = batch(round_, rank)
            for layer in range(len(layers)) if len(x) else ():
                routing = route(x, layers[layer].moe, torch.zeros(len(x), dtype=torch.bool), rules)
                alone.append(run_moe(numerics, x.clone(), layers[layer].moe, routing, rules.limit))
        assert len(found) == len(alone)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def step_all(group: GlooGroup, rank: Rank) -> None:
    """Step until no rank has work."""
    steps = GroupSteps(group)
    while (verdict := steps.agree(rank.engine, now_us=len(rank.outputs))) is not None:
        rank.step(verdict)
    assert not rank.engine.has_work


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_normal_ranks_answer_as_one_does(narrow_drafting: Model, size: int, drafts: int) -> None:
    """Each rank has requests of its own, one of them none; prefill and decode are voted for."""
    model = narrow_drafting if drafts else dataclasses.replace(narrow_drafting, drafter=None)
    lengths = {0: (37, 5, 90), 1: (), 2: (64,)}
    ends: dict[int, list[str]] = {}

    def work(group: GlooGroup) -> None:
        world = World(share_experts(model, group).model, KEEP, GRAIN, seed=group.rank)
        rank = world.rank(Role.NORMAL, step_tokens_max=64, drafts=drafts)
        requests = [
            world.request(f"r{i}", length, SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True))
            for i, length in enumerate(lengths[group.rank])
        ]
        for request in requests:
            world.submit(rank, request)
        step_all(group, rank)
        world.model = model  # judged by the plain loop on one rank
        ends[group.rank] = [str(rank.finished[request.request_id].reason) for request in requests]
        for request in requests:
            world.check(request, rank.tokens[request.request_id])

    together(size, work)
    assert ends == {rank: [str(FinishReason.LENGTH)] * len(lengths[rank]) for rank in range(size)}


def test_a_prompt_group_and_a_completion_group(narrow: Model) -> None:
    """Four ranks in two groups: what the one computes the other answers from."""
    prompts, waiting = {}, threading.Barrier(2)

    def prefill(group: GlooGroup) -> None:
        world = World(share_experts(narrow, group).model, KEEP, GRAIN, seed=group.rank)
        rank = world.rank(Role.PROMPT, step_tokens_max=48)
        request = world.request(
            f"r{group.rank}", 30 + 40 * group.rank, SamplingParams(0.0, max_tokens=6, ignore_eos=True)
        )
        world.submit(rank, request)
        step_all(group, rank)
        prompts[group.rank] = (world, rank, request)

    def decode(group: GlooGroup) -> None:
        world, source, request = prompts[group.rank]
        world.model = share_experts(narrow, group).model
        rank = world.rank(Role.COMPLETION)
        world.hand_off(source, rank, request.request_id)
        waiting.wait(WAIT_S)
        step_all(group, rank)
        world.model = narrow
        world.check(request, source.tokens.get(request.request_id, []) + rank.tokens[request.request_id])

    together(2, prefill)
    together(2, decode)


def test_a_silent_rank_ends_the_wait_of_the_others() -> None:
    def work(group: GlooGroup) -> None:
        if group.rank == 0:
            with pytest.raises(GroupBrokenError, match="rank 0 of 2 lost another"):
                group.all_gather(torch.zeros(3, dtype=torch.int64))

    together(2, work, wait_s=1.0)


def test_a_ballot_travels_whole() -> None:
    for role in (Role.PROMPT, Role.COMPLETION, Role.NORMAL):
        ballot = Ballot(role, 7, True, False, True, 10, 60, True)
        row = to_row(ballot, has_work=True)
        assert from_row(row) == ballot
        assert row[0] == 1


def test_experts_move_while_ranks_serve_and_no_answer_changes(narrow: Model) -> None:
    """Busy experts get copies and others other ranks, between the steps, and all ranks do alike."""
    found: dict[int, tuple[dict[str, int], float]] = {}

    def work(group: GlooGroup) -> None:
        shared = share_experts(narrow, group, extra=2)
        timing = TimingConfig(window=10, interval=24)
        balance = ExpertBalance(group, shared.experts, shared.bank, shared.placement, BalanceConfig(timing, 200_000))
        world = World(shared.model, KEEP, GRAIN, seed=3 + group.rank)
        rank = world.rank(Role.NORMAL, step_tokens_max=64)
        sampling = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
        requests = [world.request(f"r{i}", 30, sampling) for i in range(2)]
        for request in requests:
            world.submit(rank, request)
        steps = GroupSteps(group, balance)
        while (verdict := steps.agree(rank.engine, now_us=len(rank.outputs))) is not None:
            steps.stepped(rank.step(verdict).kind)
        counts = balance.counters()
        assert counts["experts_layers_changed"] >= len(narrow.trunk.layers)
        assert counts["experts_rows_busiest"] * group.size >= counts["experts_rows_all"]
        world.model = narrow
        for request in requests:
            world.check(request, rank.tokens[request.request_id])
        found[group.rank] = (counts, balance.moe_lb)

    together(2, work)
    assert found[0] == found[1], "ranks see the same loads and do the same"
    assert found[0][0]["experts_rearranged"] >= 2
    assert found[0][1] >= 1.0
