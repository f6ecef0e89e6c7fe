"""Resolve a manifest with facts about model and machine into a ResolvedCluster, which holds no "auto"."""

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import yaml
from msgspec import Struct
from shoal.balancers.config import DecodeConfig, EncodeConfig, PrefillConfig
from shoal.cluster.core.membership import MembershipConfig
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.errors import ManifestError
from shoal.cluster.facts import Facts, ModelFacts
from shoal.cluster.manifest_types import Decode, Manifest, Normal, Prefill, Transfer
from shoal.cluster.quantities import Duration
from shoal.cluster.resolve_rules import problems_with_facts
from shoal.engines.config import (
    STEP_TIME_AUTO,
    STEP_TIME_OFF,
    CacheConfig,
    Determinism,
    EngineConfig,
    Role,
    Truncation,
    TruncationMode,
    VerifyMode,
)
from shoal.engines.core.layout import blocks_needed, slots_count


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One rank to run: member name `<role>/<index>` in membership, with its engine's configuration.

    Each `ranks` members in a row are one group, which steps together and shares out its experts: each rank holds
    `extra_experts` copies, and every `rebalance_every` steps they are laid out anew.
    """

    name: str
    role: str
    engine: EngineConfig
    ranks: int = 1
    extra_experts: int = 0
    rebalance_every: int = 0


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


TTL_NAMES = ("agent", "chat", "default", "max_age")


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
    policy: str
    host_cache_bytes: int
    directory: str


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """Where clients connect; `keys_file` None: no keys asked for.

    `grpc`: host:port of the store's gateway, None for none; `grpc_tls`: its certificate and key files.
    """

    host: str
    port: int
    keys_file: str | None
    grpc: str | None = None
    grpc_tls: tuple[str, str] | None = None


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

    def to_yaml(self) -> str:
        """The whole as YAML text: printed at start, kept with every result."""
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False, allow_unicode=True)


def resolve(manifest: Manifest, facts: Facts, file: str) -> ResolvedCluster:
    """The cluster that `manifest` asks for, given the facts. Raises ManifestError for what the facts do not allow."""
    if found := problems_with_facts(manifest, facts):
        raise ManifestError(file, found)
    normal = manifest.normal is not None
    keep = _truncation(manifest, facts).keep if manifest.store is not None else 0
    entry, balancers = manifest.entrypoint, manifest.balancers
    return ResolvedCluster(
        name=manifest.name,
        model_path=manifest.model.path,
        model=facts.model,
        max_model_len=manifest.model.max_model_len,
        device=manifest.device,
        determinism=manifest.determinism,
        groups=_groups(manifest, facts),
        encoders=tuple(
            EncoderSpec(f"encoder/{i}", int(manifest.encoders.cache)) for i in range(manifest.encoders.replicas)
        ),
        entrypoints=entry.replicas,
        prefill_balancer=PrefillConfig(
            **_weights(balancers.prefill), grain_tokens=facts.model.block_tokens, queue_max=balancers.queue_max
        ),
        decode_balancer=DecodeConfig(**_weights(balancers.decode), block_tokens=facts.model.block_tokens),
        encode_balancer=EncodeConfig(**_weights(balancers.encode), queue_max=balancers.queue_max),
        transfer=None if normal else _transfer(manifest),
        store=_store(manifest),
        api=_api(manifest),
        policy=RequestPolicy(
            normal=normal,
            keep=keep,
            grain_tokens=facts.model.block_tokens,
            wait_us=int(entry.wait),
            attempts_max=entry.attempts_max,
            deadline_us=int(entry.deadline),
        ),
        membership=_membership(manifest),
        heartbeat_us=int(manifest.controller.heartbeat),
    )


def _weights(section: Struct) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.__struct_fields__}


def _truncation(manifest: Manifest, facts: Facts) -> Truncation:
    """Every engine of a cluster truncates alike, or a re-routed request would not compute the same."""
    section = manifest.normal or manifest.prefill
    assert section is not None, "a manifest without normal has prefill"
    keep = section.truncation.keep
    auto = facts.model.window + facts.model.backtracking
    return Truncation(TruncationMode(section.truncation.mode), auto if keep == "auto" else keep)


def _groups(manifest: Manifest, facts: Facts) -> tuple[GroupSpec, ...]:
    specs = []
    for name, role, section in (
        ("prefill", Role.PROMPT, manifest.prefill),
        ("decode", Role.COMPLETION, manifest.decode),
        ("normal", Role.NORMAL, manifest.normal),
    ):
        if section is not None:
            engine = _engine(role, section, manifest, facts)
            shape = (section.dp, section.extra_experts, section.rebalance_every)
            count = section.groups * section.dp
            specs += [GroupSpec(f"{name}/{index}", name, engine, *shape) for index in range(count)]
    return tuple(specs)


def _engine(role: Role, section: Prefill | Decode | Normal, manifest: Manifest, facts: Facts) -> EngineConfig:
    model_len, block_tokens = manifest.model.max_model_len, facts.model.block_tokens
    # A prompt engine keeps the drafter's window entries for the engine that it hands off to.
    drafting = manifest.decode if isinstance(section, Prefill) else section
    drafts = drafting.drafts if drafting is not None else 0
    rows = section.sequences_max * (1 + drafts)
    each = blocks_needed(model_len + drafts, block_tokens)
    blocks = 1 + section.sequences_max * each if section.blocks == "auto" else section.blocks
    slots = max(section.sequences_max + 1, slots_count(section.sequences_max))
    return EngineConfig(
        role=role,
        max_model_len=model_len,
        step_tokens_max=rows if isinstance(section, Decode) else section.step_tokens_max,
        step_time_us=STEP_TIME_OFF if isinstance(section, Decode) else _step_time_us(section.step_time_budget),
        sequences_max=section.sequences_max,
        truncation=_truncation(manifest, facts),
        cache=CacheConfig(block_tokens, blocks, slots if section.slots == "auto" else section.slots),
        drafts=drafts,
        verify=VerifyMode.FULL if isinstance(section, Prefill) else VerifyMode(section.verify),
        waiting_max=0 if isinstance(section, Decode) else manifest.balancers.queue_max,
        determinism=Determinism(manifest.determinism),
    )


def _step_time_us(asked: str) -> int:
    words = {"off": STEP_TIME_OFF, "auto": STEP_TIME_AUTO}
    return words[asked] if asked in words else int(Duration.parse(asked))


def _transfer(manifest: Manifest) -> TransferSpec:
    asked = manifest.transfer or Transfer()
    return TransferSpec(asked.backend, asked.checksum, int(asked.lease))


def _store(manifest: Manifest) -> StoreSpec | None:
    asked = manifest.store
    if asked is None:
        return None
    return StoreSpec(
        nodes=asked.nodes,
        devices_per_node=asked.devices_per_node,
        data=asked.code.data,
        parity=asked.code.parity,
        ask=asked.code.data + 1 if asked.code.ask == "auto" else asked.code.ask,
        capacity_bytes=int(asked.capacity),
        ttl_us=tuple((name, int(getattr(asked.ttl, name))) for name in TTL_NAMES),
        policy=asked.policy,
        host_cache_bytes=int(asked.host_cache),
        directory="" if asked.directory == "auto" else asked.directory,
    )


def _api(manifest: Manifest) -> ApiSpec:
    host, _, port = manifest.api.http.rpartition(":")
    tls = manifest.api.grpc_tls
    identity = None if tls is None else (tls.certificate, tls.key)
    return ApiSpec(host, int(port), manifest.api.keys, manifest.api.grpc, identity)


def _membership(manifest: Manifest) -> MembershipConfig:
    asked = manifest.controller
    return replace(
        MembershipConfig(),
        lost_after_us=int(asked.lost_after),
        start_timeout_us=int(asked.start_timeout),
        drain_timeout_us=int(asked.drain_timeout),
        backoff_us=int(asked.restart_backoff),
        restarts_max=asked.restarts_max,
        restarts_window_us=int(asked.restarts_window),
    )


def _plain(value: object) -> object:
    """Only what YAML and JSON have words for."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
