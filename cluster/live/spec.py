"""What every actor of a cluster is built from: the resolved manifest and where this cluster's files are."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.core.membership import MembershipConfig
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.live.names import (
    DECODE_BALANCER,
    ENCODE_BALANCER,
    ENCODER,
    GATEWAY,
    INDEX,
    NODE,
    PREFILL_BALANCER,
)
from shoal.cluster.resolve import GroupSpec, ResolvedCluster
from shoal.engines.config import EngineConfig
from shoal.kvstore.config import CodeConfig, DeviceConfig, IndexConfig, StoreConfig, TtlConfig
from shoal.kvstore.core.chain import Namespace

HEADER_BYTES = 1 << 16  # of each weight file, hashed into the revision: tensor names, shapes and offsets


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """One cluster to run. `revision` names the weights in store keys; `run_dir` holds the store's devices and logs.

    `owns_serve`: this cluster started Ray Serve, so Serve goes with it.
    """

    cluster: ResolvedCluster
    model_dir: str
    revision: str
    run_dir: str
    created_us: int
    owns_serve: bool = True

    @property
    def name(self) -> str:
        """Name of the cluster, first part of all its actors' names."""
        return self.cluster.name

    @property
    def membership(self) -> MembershipConfig:
        """Supervision limits."""
        return self.cluster.membership

    @property
    def policy(self) -> RequestPolicy:
        """Limits of one request."""
        return self.cluster.policy

    @property
    def desired(self) -> tuple[tuple[str, int], ...]:
        """(role, count) of everything the controller supervises, in the order to start it."""
        roles: dict[str, int] = {}
        if self.cluster.store:
            roles |= {NODE: self.cluster.store.nodes, INDEX: 1}
        if self.cluster.api.grpc:
            roles[GATEWAY] = 1
        roles[PREFILL_BALANCER] = 1
        if not self.cluster.is_normal:
            roles[DECODE_BALANCER] = 1
        for group in self.cluster.groups:
            roles[group.role] = roles.get(group.role, 0) + 1
        if self.cluster.encoders:
            roles |= {ENCODE_BALANCER: 1, ENCODER: len(self.cluster.encoders)}
        return tuple(roles.items())

    def engine(self, role: str) -> EngineConfig:
        """Engine configuration of a role's groups (all groups of a role are alike)."""
        return self.group(role).engine

    def group(self, role: str) -> GroupSpec:
        """The first group of a role."""
        return next(group for group in self.cluster.groups if group.role == role)

    def namespace(self, salt: str) -> Namespace:
        """The store namespace of this model as these engines run it, for one tenant's salt."""
        model, engine = self.cluster.model, self.cluster.groups[0].engine
        return Namespace(
            model=model.name,
            revision=self.revision,
            kv_format=f"block{model.block_tokens}:{model.block_bytes}/stored{model.stored_bytes}",
            precision="n1",
            truncation=str(engine.truncation.mode),
            tenant_salt=salt.encode(),
        )

    def store_config(self) -> StoreConfig:
        """The store, its devices as directories `<store dir>/<node>/device-<d>`."""
        store = self.cluster.store
        assert store is not None, "this cluster has no store"
        root = Path(store.directory or os.path.join(self.run_dir, "store"))
        share = store.capacity_bytes // (store.nodes * store.devices_per_node)
        devices = tuple(
            DeviceConfig(
                name=f"{NODE}-{node}.device-{device}",
                node=f"{NODE}/{node}",
                path=str(root / f"{NODE}-{node}" / f"device-{device}"),
                capacity_bytes=share,
            )
            for node in range(store.nodes)
            for device in range(store.devices_per_node)
        )
        ttl = dict(store.ttl_us)
        return StoreConfig(
            devices=devices,
            index=IndexConfig(
                capacity_bytes=store.capacity_bytes,
                ttl=TtlConfig(agent_us=ttl["agent"], chat_us=ttl["chat"], default_us=ttl["default"]),
                grain_tokens=self.cluster.model.block_tokens,
            ),
            code=CodeConfig(store.data, store.parity, store.ask, min(store.data + 1, store.data + store.parity)),
            stripe_bytes=min(4 << 20, max(1 << 20, share // 16)),
            segment_bytes=min(64 << 20, max(4 << 20, share // 8)),
            host_cache_bytes=store.host_cache_bytes,
        )


def model_revision(directory: Path) -> str:
    """Names a checkpoint's content cheaply: JSON files, sums if it has any, and weight files' sizes and headers."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.safetensors"), *directory.glob("SHA256SUMS")]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES) if path.suffix == ".safetensors" else file.read())
    return digest.hexdigest()[:32]
