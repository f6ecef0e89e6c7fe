"""Resolve a manifest with facts about model and machine into a ResolvedCluster, which holds no "auto"."""

from dataclasses import dataclass

from shoal.balancers.config import DecodeConfig, EncodeConfig, PrefillConfig
from shoal.cluster.core.membership import MembershipConfig
from shoal.cluster.core.policy import RequestPolicy
from shoal.engines.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolving needs to know of a checkpoint, read from its own configuration (bytes are exact).

    `weights_bytes` of the language model as loaded, `vision_bytes` of encoder and aligner (0: the model is blind).
    """

    name: str
    positions_max: int
    window: int
    backtracking: int
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    stored_bytes: int
    hidden: int
    weights_bytes: int
    vision_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What one node offers."""

    memory_bytes: int
    disk_free_bytes: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything resolve() knows besides the manifest."""

    model: ModelFacts
    machine: MachineFacts


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group to run: member name `<role>/<index>` in membership, with its engine's configuration."""

    name: str
    role: str
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One vision encoder."""

    name: str
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """Hand-off between groups; None in a NORMAL deployment."""

    backend: str
    checksum: bool
    lease_us: int


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The store's shape. `directory` holds `node-<n>/device-<d>`; "" is under the run directory."""

    nodes: int
    devices_per_node: int
    data: int
    parity: int
    ask: int
    capacity_bytes: int
    ttl_us: tuple[tuple[str, int], ...]
    host_cache_bytes: int
    directory: str


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """Where clients connect; `keys_file` None: no keys asked for."""

    host: str
    port: int
    keys_file: str | None


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """A cluster with every number decided: what the shells build from, and what is printed and kept with results."""

    name: str
    model_path: str
    model: ModelFacts
    max_model_len: int
    device: str
    determinism: str
    groups: tuple[GroupSpec, ...]
    encoders: tuple[EncoderSpec, ...]
    entrypoints: int
    prefill_balancer: PrefillConfig
    decode_balancer: DecodeConfig
    encode_balancer: EncodeConfig
    transfer: TransferSpec | None
    store: StoreSpec | None
    api: ApiSpec
    policy: RequestPolicy
    membership: MembershipConfig
    heartbeat_us: int

    @property
    def is_normal(self) -> bool:
        """One engine prefills and decodes; there is no hand-off."""
        return self.policy.normal

    def desired(self) -> tuple[tuple[str, int], ...]:
        """(role, count) of everything membership supervises, in the order to start it."""
        roles: dict[str, int] = {}
        if self.store:
            roles["store"] = self.store.nodes
        roles["balancer"] = 1
        for group in self.groups:
            roles[group.role] = roles.get(group.role, 0) + 1
        if self.encoders:
            roles["encode"] = len(self.encoders)
        roles["entrypoint"] = self.entrypoints
        return tuple(roles.items())
