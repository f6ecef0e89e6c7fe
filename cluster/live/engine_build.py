"""Builds the parts of one engine actor: its rank of the group, model, memory, transfer, and how they are wired."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.balancers.reports import GroupRef
from shoal.cluster.core.handoff import Group
from shoal.cluster.live.engine_parts import EngineParts
from shoal.cluster.live.names import role_of
from shoal.cluster.live.pace import Alone, Pace, Together
from shoal.cluster.live.rank_meeting import RankMeeting
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import Members, Surroundings
from shoal.cluster.transfer import Transfer
from shoal.engines.grammar.compiler import GrammarCompiler
from shoal.engines.run.curve_start import KeptCurves
from shoal.engines.run.engine import Engine
from shoal.engines.run.group_steps import GroupSteps
from shoal.engines.run.grouped_experts import share_experts
from shoal.engines.run.load import build_engine, grammar_compiler, implementations, load_model
from shoal.engines.run.memory import DeviceMemory
from shoal.engines.run.rank_group import Collectives


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded engine, what a transfer library registered for it, and what compiles its requests' grammars."""

    engine: Engine
    memory: DeviceMemory
    transfer: Transfer | None
    implementations: Mapping[str, str]
    compiler: GrammarCompiler | None = None


async def open_parts(
    spec: ClusterSpec, group: GroupRef, directory: Members, place: Surroundings, meeting: RankMeeting
) -> EngineParts:
    """Load and wire one engine; the heavy part runs in a thread, so that the actor still answers pings."""
    loop = asyncio.get_running_loop()
    ranks = await meeting.meet()
    built = await loop.run_in_executor(None, place.build, spec, group, ranks)
    pace: Pace = Alone()
    if ranks is not None:
        pace = Together(GroupSteps(ranks), lambda vote: loop.call_soon_threadsafe(meeting.wake_others, vote))
    return EngineParts(spec, group, directory, built, place.end, pace)


def build(
    spec: ClusterSpec, group: GroupRef, transfer_of: Callable[[str], Transfer], ranks: Collectives | None = None
) -> Built:
    """A rank's engine from the checkpoint; its memory is registered with the transfer of its agent name."""
    config = spec.engine(role_of(group))
    model = load_model(Path(spec.model_dir), with_drafter=config.drafts > 0)
    if ranks is not None:
        model = share_experts(model, ranks)
    curves = KeptCurves(Path(spec.run_dir) / "curves", spec.revision)
    engine, memory = build_engine(model, config, saves_grains=spec.cluster.store is not None, curves=curves)
    transfer = None if spec.cluster.is_normal else registered(transfer_of, group, memory)
    return Built(engine, memory, transfer, implementations(model), grammar_compiler(Path(spec.model_dir), model))


def registered(transfer_of: Callable[[str], Transfer], group: GroupRef, memory: DeviceMemory) -> Transfer:
    """A transfer under the group's agent name that peers may use to write into `memory`."""
    transfer = transfer_of(Group(group.name, group.epoch).agent)
    for name, buffer in memory.buffers().items():
        transfer.register(name, buffer)
    return transfer
