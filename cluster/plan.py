"""What a resolved cluster will take: memory of each member, placement, store, network, and what forbids it."""

from dataclasses import asdict, dataclass

from shoal.cluster.facts import Facts
from shoal.cluster.quantities import Size
from shoal.cluster.resolve import GroupSpec, ResolvedCluster
from shoal.engines.config import Role
from shoal.engines.core.layout import blocks_needed, draft_pool_bytes

PROCESS_BYTES = 180 * 1024**2  # one actor with torch imported (measured: dependencies, "actor with torch imported")


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """Bytes one member holds: weights as stored, block pool, slot pool, caches, draft info, the process itself."""

    name: str
    weights_bytes: int
    blocks_bytes: int
    slots_bytes: int
    cache_bytes: int
    drafts_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        pools = self.blocks_bytes + self.slots_bytes + self.cache_bytes + self.drafts_bytes
        return self.weights_bytes + pools + PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class StorePlan:
    """How much the store keeps: `usable_bytes` after parity, and how many tokens that is at one anchor a grain."""

    devices: int
    capacity_bytes: int
    device_bytes: int
    usable_bytes: int
    tokens: int
    losses_survived: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The whole; `handoff_bytes` is what one longest prompt sends from PROMPT to COMPLETION (0: no hand-off)."""

    name: str
    members: tuple[MemberPlan, ...]
    memory_bytes: int
    machine_bytes: int
    handoff_bytes: int
    store: StorePlan | None
    refusals: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values for `--json`."""
        return asdict(self)

    def lines(self) -> tuple[str, ...]:
        """The plan as text."""
        rows = [
            f"{'member':<12} {'weights':>10} {'blocks':>10} {'slots':>10} {'cache':>10} {'drafts':>10} {'total':>10}"
        ]
        for m in self.members:
            sizes = (m.weights_bytes, m.blocks_bytes, m.slots_bytes, m.cache_bytes, m.drafts_bytes, m.total_bytes)
            rows.append(f"{m.name:<12} " + " ".join(f"{_mib(size):>10}" for size in sizes))
        rows.append(f"memory: {_mib(self.memory_bytes)} of {_mib(self.machine_bytes)} on one machine")
        if self.handoff_bytes:
            rows.append(f"hand-off of the longest prompt: {_mib(self.handoff_bytes)}")
        if self.store:
            s = self.store
            rows.append(
                f"store: {s.devices} devices x {_mib(s.device_bytes)}, {_mib(s.usable_bytes)} after parity, about "
                f"{s.tokens} tokens; survives the loss of {s.losses_survived} devices"
            )
        return (*rows, *(f"refused: {reason}" for reason in self.refusals))


def make_plan(cluster: ResolvedCluster, facts: Facts) -> ClusterPlan:
    """The plan of a resolved cluster, all members on one machine of these facts."""
    model = facts.model
    members = [
        MemberPlan(
            name=group.name,
            weights_bytes=model.weights_bytes,
            blocks_bytes=group.engine.cache.blocks_count * model.block_bytes,
            slots_bytes=group.engine.cache.slots_count * model.slot_bytes,
            cache_bytes=_host_cache(cluster, group),
            drafts_bytes=_draft_info(group, model.vocabulary),
        )
        for group in cluster.groups
    ]
    members += [MemberPlan(e.name, model.vision_bytes, 0, 0, e.cache_bytes) for e in cluster.encoders]
    memory_bytes = sum(member.total_bytes for member in members)
    handoff_bytes = 0
    if cluster.transfer:
        handoff_bytes = blocks_needed(cluster.max_model_len, model.block_tokens) * model.block_bytes + model.slot_bytes
    store = _store(cluster, facts)
    refusals = []
    if memory_bytes > facts.machine.memory_bytes:
        refusals.append(
            f"members need {_mib(memory_bytes)}, the machine has {_mib(facts.machine.memory_bytes)}; "
            "lower sequences_max, max_model_len or groups"
        )
    if store and store.capacity_bytes > facts.machine.disk_free_bytes:
        refusals.append(
            f"store.capacity = {Size(store.capacity_bytes)}, the disk has {_mib(facts.machine.disk_free_bytes)} free; "
            "lower it or set store.directory"
        )
    return ClusterPlan(
        cluster.name, tuple(members), memory_bytes, facts.machine.memory_bytes, handoff_bytes, store, tuple(refusals)
    )


def _host_cache(cluster: ResolvedCluster, group: GroupSpec) -> int:
    """Every group that reads prompts has a host cache of its own; a COMPLETION group only saves."""
    reads = group.engine.role is not Role.COMPLETION
    return cluster.store.host_cache_bytes if cluster.store and reads else 0


def _draft_info(group: GroupSpec, vocabulary: int) -> int:
    """The distributions that drafts were drawn from, float32 over the vocabulary, in every slot and the null slot."""
    config = group.engine
    drafts = 0 if config.role is Role.PROMPT else config.drafts
    return draft_pool_bytes(config.sequences_max, drafts, vocabulary)


def _store(cluster: ResolvedCluster, facts: Facts) -> StorePlan | None:
    asked = cluster.store
    if asked is None:
        return None
    devices = asked.nodes * asked.devices_per_node
    usable = asked.capacity_bytes * asked.data // (asked.data + asked.parity)
    grain_bytes = facts.model.block_bytes + facts.model.stored_bytes
    return StorePlan(
        devices=devices,
        capacity_bytes=asked.capacity_bytes,
        device_bytes=asked.capacity_bytes // devices,
        usable_bytes=usable,
        tokens=usable // grain_bytes * facts.model.block_tokens,
        losses_survived=asked.parity,
    )


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"
