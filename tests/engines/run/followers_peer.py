"""A PROMPT engine's prompts, alone or with followers; and a follower, as a process of its own if need be."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from engine_world import World
from shoal.engines.config import Role
from shoal.engines.core.request import SamplingParams
from shoal.engines.model.decoder import Model
from shoal.engines.run.followers import Followers
from shoal.engines.run.load import build_follower, load_model
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.rank_group import Collectives, GlooGroup, Meeting

SEED, GRAIN, KEEP, STEP_TOKENS = 8, 16, 24, 64
LENGTHS = (200, 37, 1, 80)
PEER_WAIT_S = 60.0


class Served(NamedTuple):
    """What one engine gave out, and its memory afterwards."""

    tokens: dict[str, list[int]]
    saved: dict[tuple[str, int], bytes]
    memory: DeviceMemory


def serve(model: Model, keep: int, followers: Followers | None) -> Served:
    """Prompts of several chunks, one with images; then the first one again, whose beginning comes from the store."""
    world = World(model, keep, GRAIN, SEED)
    rank = world.rank(Role.PROMPT, saves=True, followers=followers, step_tokens_max=STEP_TOKENS)
    requests = []
    for i, length in enumerate(LENGTHS):
        sampling = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=4, ignore_eos=True)
        checkpoints = ((length - keep) // GRAIN * GRAIN,) if length > keep + GRAIN else ()
        images = (9, 60) if length == 80 else ()
        requests.append(world.request(f"r{i}", length, sampling, images, checkpoints=checkpoints))
        world.submit(rank, requests[-1])
    rank.run()
    again = dataclasses.replace(requests[0], request_id="again", hit_tokens=requests[0].checkpoints[0], checkpoints=())
    world.submit(rank, again)
    world.load_hit(rank, again, rank, "r0")
    rank.run()
    assert rank.tokens["again"] == rank.tokens["r0"]
    return Served(rank.tokens, rank.grains | rank.anchors, rank.memory)


def follow(model: Model, keep: int, group: Collectives) -> DeviceMemory:
    """Follow `serve` to its end, from memory with the same garbage."""
    world = World(model, keep, GRAIN, SEED)
    follower = build_follower(model, world.config(Role.PROMPT, step_tokens_max=STEP_TOKENS), group)
    world.soil(follower.memory)
    follower.run()
    return follower.memory


def follow_in_process(directory: str, keep: int, port: int, report: str) -> None:
    """Rank 1 of two; writes its memory to a file."""
    torch.set_num_threads(1)
    meeting = Meeting("127.0.0.1", port, 1, 2)
    group = GlooGroup(meeting, GlooGroup.find_store(meeting), PEER_WAIT_S)
    memory = follow(load_model(Path(directory)), keep, group)
    torch.save((memory.blocks, memory.slots), report)
