"""A PROMPT engine with followers is the engine of one rank: first tokens, grains, anchors, and everybody's memory."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from engine_world import World
from followers_peer import GRAIN, KEEP, LENGTHS, PEER_WAIT_S, SEED, Served, follow, follow_in_process, serve
from rank_threads import together
from shoal.engines.config import Role
from shoal.engines.model.decoder import Model
from shoal.engines.run.followers import Followers
from shoal.engines.run.rank_group import GlooGroup, GroupBrokenError, Meeting


def test_followers_change_nothing(narrow: Model) -> None:
    """Also copies and clears reach everybody; waiting is no work."""

    def work(group: GlooGroup) -> object:
        if group.rank:
            return follow(narrow, KEEP, group)
        followers = Followers(group)
        served = serve(narrow, KEEP, followers)
        before = served.memory.slots.clone()
        served.memory.clone_blocks([(5, 9), (6, 0)])
        served.memory.clone_slots([(2, 3)])
        served.memory.zero_slots([4])
        assert not torch.equal(served.memory.slots, before)
        followers.wait()
        followers.end()
        return served

    alone = serve(narrow, KEEP, None)
    assert len(alone.tokens) == len(LENGTHS) + 1
    assert len(alone.saved) > 10
    leading, *memories = together(3, work)
    assert isinstance(leading, Served)
    assert leading.tokens == alone.tokens
    assert leading.saved == alone.saved
    for memory in memories:
        assert torch.equal(memory.blocks, leading.memory.blocks)
        assert torch.equal(memory.slots, leading.memory.slots)


def test_a_follower_in_another_process(toy: Model, toy_dir: Path, tmp_path: Path) -> None:
    """The toy checkpoint, loaded twice."""
    keep, store, report = toy.config.keep_min, GlooGroup.open_store("127.0.0.1", 2), tmp_path / "memory"
    arguments = (str(toy_dir), keep, store.port, str(report))
    peer = multiprocessing.get_context("spawn").Process(target=follow_in_process, args=arguments)
    peer.start()
    try:
        alone = serve(toy, keep, None)
        meeting = Meeting("127.0.0.1", store.port, 0, 2)
        followers = Followers(GlooGroup(meeting, GlooGroup.find_store(meeting), PEER_WAIT_S))
        served = serve(toy, keep, followers)
        followers.end()
        peer.join(PEER_WAIT_S)
        assert peer.exitcode == 0
    finally:
        peer.kill()
    assert served.tokens == alone.tokens
    assert served.saved == alone.saved
    blocks, slots = torch.load(report)
    assert torch.equal(blocks, served.memory.blocks)
    assert torch.equal(slots, served.memory.slots)


def test_a_silent_leader_ends_its_followers(narrow: Model) -> None:
    def work(group: GlooGroup) -> None:
        if group.rank:
            with pytest.raises(GroupBrokenError, match="rank 1 of 2 lost another"):
                follow(narrow, KEEP, group)

    together(2, work, wait_s=1.0)


def test_engines_that_decode_have_no_followers(narrow: Model) -> None:
    def work(group: GlooGroup) -> None:
        if group.rank == 0:
            for role in (Role.NORMAL, Role.COMPLETION):
                with pytest.raises(ValueError, match=f"role = {role} with 2 context-parallel ranks"):
                    World(narrow, KEEP, GRAIN, SEED).rank(role, followers=Followers(group))

    together(2, work)
