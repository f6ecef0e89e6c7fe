"""What a manifest asks of the store, as frozen values that refuse to exist when a rule is broken."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.kvstore.core.chain import GRAIN_TOKENS
from shoal.kvstore.core.placement import Slot
from shoal.kvstore.core.records import TrafficClass
from shoal.kvstore.errors import ConfigError

MIB = 1 << 20
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US


def _require(holds: bool, field: str, value: object, rule: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(field, value, rule, remedy)


class FsyncRule(StrEnum):
    """When a device makes appended bytes durable.

    ALWAYS: fdatasync before each append is answered, so an acknowledged stripe survives a power cut. SEGMENT: when a
    segment is full; a power cut may lose the open segment of each device, a killed process loses nothing. NEVER: the
    kernel decides. Under every rule lost bytes are seen by checksum and become misses.
    """

    ALWAYS = "always"
    SEGMENT = "segment"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class CodeConfig:
    """Shape of a stripe: `data` + `parity` shards, `ask` asked at once, `durable_min` acknowledged writes.

    10+2, ask 11 and 11 durable: "Q&A, KV storage" (any 10 of 12 decode); one spare answer hides one slow device.
    """

    data: int = 10
    parity: int = 2
    ask: int = 11
    durable_min: int = 11

    def __post_init__(self) -> None:
        _require(self.data >= 1, "code.data", self.data, "must be at least 1", "10 is the default")
        _require(self.parity >= 1, "code.parity", self.parity, "must be at least 1", "use 2 to survive two losses")
        _require(self.width <= 255, "code.data + code.parity", self.width, "must be at most 255", "use fewer shards")
        inside = f"must lie between data = {self.data} and data + parity = {self.width}"
        _require(self.data <= self.ask <= self.width, "code.ask", self.ask, inside, f"use {self.data + 1}")
        kept = self.data <= self.durable_min <= self.width
        _require(kept, "code.durable_min", self.durable_min, inside, f"use {self.data + 1}")

    @property
    def width(self) -> int:
        """Fragments of one stripe, each on its own device."""
        return self.data + self.parity


@dataclass(frozen=True, slots=True)
class TtlConfig:
    """Sliding time to live by class, refreshed on hit, and the age at which bytes go however often they were hit.

    Agent 3 days and chat 7 days: "Q&A, KV storage" (chat at 3 days loses 0.5-1 point of hit rate).
    """

    agent_us: int = 3 * DAY_US
    chat_us: int = 7 * DAY_US
    default_us: int = 3 * DAY_US
    max_age_us: int = 30 * DAY_US

    def __post_init__(self) -> None:
        for name in ("agent_us", "chat_us", "default_us", "max_age_us"):
            value = getattr(self, name)
            _require(
                value > 0, f"ttl.{name}", value, "must be positive", "give microseconds, e.g. 3 days = 259200000000"
            )

    def of(self, traffic: TrafficClass) -> int:
        """Microseconds a grain of this class lives after its last use."""
        ttl = {TrafficClass.AGENT: self.agent_us, TrafficClass.CHAT: self.chat_us}
        return ttl.get(traffic, self.default_us)


class Stay(StrEnum):
    """How long a grain stays while there is room; under every rule none outlives `max_age_us`, and room is made from
    the least recently used tails.

    SLIDING: its class's time since the last use. FIXED: that time since it was saved, whatever its use, and no longer
    than the grains before it. LRU: until its room is needed.
    """

    SLIDING = "sliding"
    FIXED = "fixed"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One failure unit: a directory of one disk on one node."""

    name: str
    node: str
    path: str
    capacity_bytes: int

    def __post_init__(self) -> None:
        plain = 0 < len(self.name.encode()) <= 64 and "/" not in self.name
        _require(plain, "device.name", self.name, "must be 1 to 64 bytes without '/'", "use e.g. node0-disk3")
        enough = self.capacity_bytes >= 2 * MIB
        _require(
            enough,
            f"{self.name}.capacity_bytes",
            self.capacity_bytes,
            "must be at least 2 MiB",
            "give the disk's share",
        )

    @property
    def slot(self) -> Slot:
        """What placement needs to know of the device."""
        return Slot(self.name, self.node)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Policy of the index. `capacity_bytes` counts stored bytes (fragments with heads and padding) of the pool.

    A grain saved before its predecessor waits `orphan_grace_us` for it; at most `orphans_max` wait.
    """

    capacity_bytes: int
    ttl: TtlConfig = TtlConfig()
    grain_tokens: int = GRAIN_TOKENS
    orphan_grace_us: int = 60_000_000
    orphans_max: int = 65_536
    stay: Stay = Stay.SLIDING

    def __post_init__(self) -> None:
        _require(
            self.capacity_bytes > 0, "index.capacity_bytes", self.capacity_bytes, "must be positive", "sum the devices"
        )
        _require(
            self.grain_tokens > 0,
            "index.grain_tokens",
            self.grain_tokens,
            "must be positive",
            "use the block size, 128",
        )
        _require(
            self.orphan_grace_us >= 0,
            "index.orphan_grace_us",
            self.orphan_grace_us,
            "must not be negative",
            "use 60000000",
        )
        _require(self.orphans_max >= 0, "index.orphans_max", self.orphans_max, "must not be negative", "use 65536")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The whole store, resolved: code, devices, policy, stripe shape, durability and time limits.

    A stripe is sealed at `stripe_bytes` or when its oldest object is `flush_us` old. A write waits
    `write_timeout_us` for its fragments, `straggler_us` once `durable_min` are durable. `slow_us` after asking, a
    fetch asks the fragments that it left out. `fetch_window_stripes` bounds the bytes in flight of one fetch.
    `host_cache_bytes` of verified objects stay in the memory of each client (0: none do), and about `idle_bytes_max`
    of buffers that stripes have left behind, for the next ones.
    """

    devices: tuple[DeviceConfig, ...]
    index: IndexConfig
    code: CodeConfig = CodeConfig()
    stripe_bytes: int = 4 * MIB
    flush_us: int = 200_000
    buffer_bytes_max: int = 64 * MIB
    segment_bytes: int = 64 * MIB
    fsync: FsyncRule = FsyncRule.SEGMENT
    write_timeout_us: int = 10_000_000
    straggler_us: int = 200_000
    slow_us: int = 20_000
    fetch_window_stripes: int = 4
    host_cache_bytes: int = 0
    idle_bytes_max: int = 16 * MIB

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        _require(not twice, "devices", twice, "must have one name each", "rename the devices listed")
        short = f"must be at least code.data + code.parity = {self.code.width} devices"
        _require(len(names) >= self.code.width, "devices", len(names), short, "add directories or use a narrower code")
        sized = 64 * 1024 <= self.stripe_bytes <= 256 * MIB
        _require(sized, "stripe_bytes", self.stripe_bytes, "must lie between 64 KiB and 256 MiB", "use 1 to 16 MiB")
        holds = self.buffer_bytes_max >= self.stripe_bytes
        _require(
            holds, "buffer_bytes_max", self.buffer_bytes_max, "must hold one stripe", f"use {4 * self.stripe_bytes}"
        )
        fragment = self.stripe_bytes // self.code.data
        roomy = self.segment_bytes >= 4 * fragment
        _require(roomy, "segment_bytes", self.segment_bytes, "must hold 4 fragments", f"use at least {4 * fragment}")
        for name in ("flush_us", "write_timeout_us", "straggler_us", "slow_us", "fetch_window_stripes"):
            value = getattr(self, name)
            _require(value > 0, name, value, "must be positive", "see the default of StoreConfig")
        idle = self.idle_bytes_max
        _require(idle >= 0, "idle_bytes_max", idle, "must not be negative", "use 0 to keep no buffers")
        size = self.host_cache_bytes
        _require(size >= 0, "host_cache_bytes", size, "must not be negative", "use 0 to hold nothing in memory")
