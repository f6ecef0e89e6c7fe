"""The manifest of kind `Cluster` as frozen types: names are the contract, defaults stand here and nowhere else."""

from typing import Literal

from msgspec import Struct
from shoal.balancers.config import DecodeConfig, EncodeConfig, PrefillConfig
from shoal.cluster.core.membership import MembershipConfig
from shoal.cluster.core.policy import RequestPolicy
from shoal.cluster.quantities import Duration, Size

Auto = Literal["auto"]
_PREFILL, _DECODE, _ENCODE = PrefillConfig(), DecodeConfig(), EncodeConfig()
_POLICY, _MEMBERS = RequestPolicy(), MembershipConfig()


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """Which model: `builtin:toy`, or a directory in the published layout."""

    path: str = "builtin:toy"
    max_model_len: int = 4096


class Encoders(Struct, frozen=True, forbid_unknown_fields=True):
    """Vision encoders; 0 replicas refuses images. `cache` bounds the bytes of embeddings each one keeps."""

    replicas: int = 1
    cache: Size = Size.parse("64MiB")


class Truncation(Struct, frozen=True, forbid_unknown_fields=True):
    """YOCO truncation: only the last `keep` prompt tokens pass the decoder layers (auto: window + backtracking)."""

    mode: Literal["off", "mask", "compact"] = "compact"
    keep: int | Auto = "auto"


class Prefill(Struct, frozen=True, forbid_unknown_fields=True):
    """PROMPT groups. `blocks` and `slots` are pool sizes (auto: what `sequences_max` full-length sequences need)."""

    groups: int
    dp: int = 1
    ep: int = 1
    sequences_max: int = 8
    step_tokens_max: int = 2048
    step_time_budget: str = "off"
    truncation: Truncation = Truncation()
    blocks: int | Auto = "auto"
    slots: int | Auto = "auto"


class Decode(Struct, frozen=True, forbid_unknown_fields=True):
    """COMPLETION groups."""

    groups: int
    dp: int = 1
    ep: int = 1
    sequences_max: int = 16
    drafts: int = 0
    verify: Literal["off", "full", "varlen"] = "off"
    zos: bool = False
    extra_experts: int = 0
    blocks: int | Auto = "auto"
    slots: int | Auto = "auto"


class Normal(Struct, frozen=True, forbid_unknown_fields=True):
    """NORMAL groups: prefill and decode in one engine; instead of `prefill` and `decode`."""

    groups: int = 1
    dp: int = 1
    ep: int = 1
    sequences_max: int = 16
    step_tokens_max: int = 2048
    step_time_budget: str = "off"
    truncation: Truncation = Truncation()
    drafts: int = 0
    verify: Literal["off", "full", "varlen"] = "off"
    zos: bool = False
    extra_experts: int = 0
    blocks: int | Auto = "auto"
    slots: int | Auto = "auto"


class PrefillWeights(Struct, frozen=True, forbid_unknown_fields=True):
    """See balancers.config.PrefillConfig."""

    queue: float = _PREFILL.queue
    compute: float = _PREFILL.compute
    fetch: float = _PREFILL.fetch
    locality: float = _PREFILL.locality
    tokens_per_s: float = _PREFILL.tokens_per_s
    fetch_us_per_grain: float = _PREFILL.fetch_us_per_grain


class DecodeWeights(Struct, frozen=True, forbid_unknown_fields=True):
    """See balancers.config.DecodeConfig."""

    base_us: float = _DECODE.base_us
    sequence_us: float = _DECODE.sequence_us
    context_us: float = _DECODE.context_us
    pressure: float = _DECODE.pressure


class EncodeWeights(Struct, frozen=True, forbid_unknown_fields=True):
    """See balancers.config.EncodeConfig."""

    cached: float = _ENCODE.cached
    patches_per_s: float = _ENCODE.patches_per_s


class Balancers(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of the balancers; `queue_max` bounds waiting requests (or images) per group: beyond it, HTTP 429."""

    prefill: PrefillWeights = PrefillWeights()
    decode: DecodeWeights = DecodeWeights()
    encode: EncodeWeights = EncodeWeights()
    queue_max: int = _PREFILL.queue_max


class Transfer(Struct, frozen=True, forbid_unknown_fields=True):
    """How block KV and slots travel from PROMPT to COMPLETION groups."""

    backend: Literal["nixl"] = "nixl"
    checksum: bool = True
    lease: Duration = Duration.parse("30s")


class Code(Struct, frozen=True, forbid_unknown_fields=True):
    """Erasure code of a stripe: `data` + `parity` shards, `ask` of them are read at first."""

    data: int = 10
    parity: int = 2
    ask: int = 11


class Ttl(Struct, frozen=True, forbid_unknown_fields=True):
    """How long an unused grain is kept, by traffic class."""

    agent: Duration = Duration.parse("3d")
    chat: Duration = Duration.parse("7d")
    default: Duration = Duration.parse("1d")


class Store(Struct, frozen=True, forbid_unknown_fields=True):
    """The KV store. `capacity` is of the whole store, parity included; `directory` auto: under the run directory.

    `host_cache` is memory of EACH engine process that reads prompts (prefill or normal groups, not decode ones), for
    objects it has fetched or saved; 0 turns it off.
    """

    nodes: int = 3
    devices_per_node: int = 4
    code: Code = Code()
    capacity: Size = Size.parse("4GiB")
    ttl: Ttl = Ttl()
    host_cache: Size = Size.parse("256MiB")
    directory: str = "auto"


class Tls(Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files of a server's identity."""

    certificate: str
    key: str


class Api(Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients connect. `keys`: a file with one API key a line, or null for none.

    `grpc`: the store for engines outside the cluster, with the same keys as tokens; null: none.
    """

    http: str = "127.0.0.1:8000"
    grpc: str | None = None
    grpc_tls: Tls | None = None
    keys: str | None = None


class Entrypoint(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one request (cluster.core.entrypoint.RequestPolicy) and how many replicas handle them."""

    replicas: int = 1
    deadline: Duration = Duration(_POLICY.deadline_us)
    wait: Duration = Duration(_POLICY.wait_us)
    attempts_max: int = _POLICY.attempts_max


class Controller(Struct, frozen=True, forbid_unknown_fields=True):
    """Supervision (cluster.core.membership.MembershipConfig); members report every `heartbeat`."""

    heartbeat: Duration = Duration.parse("500ms")
    lost_after: Duration = Duration(_MEMBERS.lost_after_us)
    start_timeout: Duration = Duration(_MEMBERS.start_timeout_us)
    drain_timeout: Duration = Duration(_MEMBERS.drain_timeout_us)
    restart_backoff: Duration = Duration(_MEMBERS.backoff_us)
    restarts_max: int = _MEMBERS.restarts_max
    restarts_window: Duration = Duration(_MEMBERS.restarts_window_us)


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """What scaling aims at."""

    ttft: Duration = Duration.parse("2s")
    tpot: Duration = Duration.parse("50ms")


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """Scaling of the roles; ranges are [least, most] groups."""

    policy: Literal["off", "advisory", "on"] = "off"
    slo: Slo | None = None
    prefill: tuple[int, int] | None = None
    decode: tuple[int, int] | None = None


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """One cluster as asked for. Either `normal`, or `prefill` and `decode`; `store: null` runs without a store."""

    kind: Literal["Cluster"]
    name: str
    model: Model = Model()
    device: Literal["cpu", "cuda"] = "cpu"
    encoders: Encoders = Encoders()
    prefill: Prefill | None = None
    decode: Decode | None = None
    normal: Normal | None = None
    balancers: Balancers = Balancers()
    transfer: Transfer | None = None
    store: Store | None = None
    api: Api = Api()
    entrypoint: Entrypoint = Entrypoint()
    controller: Controller = Controller()
    scaling: Scaling = Scaling()
    determinism: Literal["off", "batch_invariant", "full"] = "batch_invariant"
