"""Rules a manifest must keep beyond its types: ranges, fields together, and what this version does not run."""

import math
import re
from collections.abc import Iterator

from shoal.cluster.errors import Problem
from shoal.cluster.manifest_types import Decode, Manifest, Normal, Prefill, Store
from shoal.cluster.quantities import Duration

_NAME = re.compile(r"^[a-z][a-z0-9-]{0,38}$")
_ADDRESS = re.compile(r"^(?P<host>[A-Za-z0-9.\-]+):(?P<port>\d{1,5})$")
_LOOPBACK = ("127.0.0.1", "localhost")
SHARDS_MAX = 32  # kept well below the 255 a code over GF(256) allows: a stripe is read by asking `ask` devices


def problems(manifest: Manifest) -> tuple[Problem, ...]:
    """Every broken rule that can be seen without facts, in the order of the manifest."""
    return (
        *_document(manifest),
        *_roles(manifest),
        *_balancers(manifest),
        *_transfer(manifest),
        *(_store(manifest.store, manifest) if manifest.store else ()),
        *_outside(manifest),
        *_not_run(manifest),
    )


def _least(path: str, value: float, least: float, remedy: str) -> Iterator[Problem]:
    if value < least:
        yield Problem(path, value, f"must be at least {least}", remedy)


def _positive(path: str, value: float, remedy: str) -> Iterator[Problem]:
    if not (value > 0 and math.isfinite(value)):
        yield Problem(path, value, "must be more than 0", remedy)


def _document(m: Manifest) -> Iterator[Problem]:
    if not _NAME.match(m.name):
        rule = "must be a lower-case name of letters, digits and dashes, at most 39 long"
        yield Problem("name", m.name, rule, "it becomes the Ray namespace; write for example local")
    if not m.model.path:
        yield Problem("model.path", m.model.path, "must not be empty", "give builtin:toy or a checkpoint directory")
    elif m.model.path.startswith("builtin:") and m.model.path != "builtin:toy":
        yield Problem("model.path", m.model.path, "is not a built-in model", "use builtin:toy or a directory")
    yield from _least("model.max_model_len", m.model.max_model_len, 2, "a prompt token and an output token need 2")
    yield from _least("encoders.replicas", m.encoders.replicas, 0, "0 refuses images, 1 or more encodes them")
    if m.encoders.replicas > 0:
        yield from _positive("encoders.cache", m.encoders.cache, "give a size such as 64MiB")


def _roles(m: Manifest) -> Iterator[Problem]:
    given = [name for name in ("prefill", "decode") if getattr(m, name) is not None]
    if m.normal is not None and given:
        rule = f"cannot stand beside {' and '.join(given)}"
        yield Problem("normal", "(given)", rule, "keep either normal, or prefill and decode")
    elif m.normal is None and len(given) < 2:
        missing = "decode" if given == ["prefill"] else "prefill"
        remedy = "give prefill and decode, or normal for one engine that does both"
        yield Problem(missing, None, "must be given", remedy)
    for name, role in (("prefill", m.prefill), ("decode", m.decode), ("normal", m.normal)):
        if role is not None:
            yield from _role(name, role)


def _role(name: str, role: Prefill | Decode | Normal) -> Iterator[Problem]:
    yield from _least(f"{name}.groups", role.groups, 1, "a cluster needs a group of each role it names")
    yield from _least(f"{name}.sequences_max", role.sequences_max, 1, "an engine runs at least one sequence")
    for pool in ("blocks", "slots"):
        count = getattr(role, pool)
        if count != "auto":
            yield from _least(f"{name}.{pool}", count, 2, "id 0 is null, so 2 is the smallest pool; or write auto")
    if not isinstance(role, Prefill):
        yield from _least(f"{name}.drafts", role.drafts, 0, "write 0 for no drafts")
    if not isinstance(role, Decode):
        yield from _least(f"{name}.step_tokens_max", role.step_tokens_max, 1, "a step computes at least one token")
        yield from _step_time(f"{name}.step_time_budget", role.step_time_budget)
        keep = role.truncation.keep
        if keep != "auto":
            yield from _least(f"{name}.truncation.keep", keep, 1, "write auto for window + backtracking")


def _step_time(path: str, value: str) -> Iterator[Problem]:
    try:
        fits = value in ("off", "auto") or Duration.parse(value) > 0
    except ValueError:
        fits = False
    if not fits:
        remedy = "auto: as long as step_tokens_max rows take"
        yield Problem(path, value, "must be off, auto or a duration such as 250ms", remedy)


def _balancers(m: Manifest) -> Iterator[Problem]:
    b = m.balancers
    for section, names in (
        ("prefill", ("queue", "compute", "fetch", "locality")),
        ("decode", ("context_us", "pressure")),
        ("encode", ("cached",)),
    ):
        for name in names:
            weight = getattr(getattr(b, section), name)
            if not (weight >= 0 and math.isfinite(weight)):
                yield Problem(f"balancers.{section}.{name}", weight, "must be 0 or more", "0 turns the term off")
    for section, name in (
        ("prefill", "tokens_per_s"), ("prefill", "fetch_us_per_grain"), ("decode", "base_us"),
        ("decode", "sequence_us"), ("encode", "patches_per_s"),
    ):  # fmt: skip
        value = getattr(getattr(b, section), name)
        yield from _positive(f"balancers.{section}.{name}", value, "it serves until a group has measured its own")
    for section, name in (("prefill", "locality"), ("encode", "cached")):
        if getattr(getattr(b, section), name) > 1:
            value = getattr(getattr(b, section), name)
            yield Problem(f"balancers.{section}.{name}", value, "must be at most 1", "it is the share of a cost saved")
    yield from _least("balancers.queue_max", b.queue_max, 1, "a request waits in a queue, if only for a moment")


def _transfer(m: Manifest) -> Iterator[Problem]:
    if m.normal is not None and m.transfer is not None:
        yield Problem("transfer", "(given)", "has no meaning with normal", "one engine hands nothing off; remove it")
    if m.transfer is not None:
        lease_us = m.transfer.lease
        if lease_us < 2 * m.controller.heartbeat:
            rule = f"must be at least twice controller.heartbeat = {m.controller.heartbeat}"
            yield Problem("transfer.lease", lease_us, rule, "leases are renewed by heartbeat; 30s is usual")


def _store(s: Store, m: Manifest) -> Iterator[Problem]:
    shards, devices = s.code.data + s.code.parity, s.nodes * s.devices_per_node
    yield from _least("store.nodes", s.nodes, 1, "remove the section to run without a store")
    yield from _least("store.devices_per_node", s.devices_per_node, 1, "each node owns a directory or more")
    yield from _least("store.code.data", s.code.data, 1, "a stripe has at least one data shard; 10 is usual")
    yield from _least("store.code.parity", s.code.parity, 1, "without parity one bad byte loses the stripe; 2 is usual")
    if shards > SHARDS_MAX:
        yield Problem("store.code", f"{s.code.data}+{s.code.parity}", f"must be at most {SHARDS_MAX} shards", "10+2")
    if devices < shards:
        rule = f"x devices_per_node = {s.devices_per_node} gives {devices} devices, fewer than the {shards} shards"
        remedy = "shards of a stripe never share a device: add nodes or devices, or a smaller code"
        yield Problem("store.nodes", s.nodes, rule, remedy)
    if not s.code.data <= s.code.ask <= shards:
        rule = f"must be from data = {s.code.data} to data + parity = {shards}"
        yield Problem("store.code.ask", s.code.ask, rule, "one more than data hides one slow device")
    yield from _positive("store.capacity", s.capacity, "give a size such as 4GiB")
    for name in ("agent", "chat", "default"):
        yield from _positive(f"store.ttl.{name}", getattr(s.ttl, name), "give a duration such as 1d")
    role = "normal" if m.normal is not None else "prefill"
    section = m.normal if m.normal is not None else m.prefill
    if section is not None and section.truncation.mode == "off":
        remedy = "a stored anchor lies before the kept rows; use compact or mask, or remove the store"
        yield Problem(f"{role}.truncation.mode", "off", "must not be off while store is on", remedy)


def _outside(m: Manifest) -> Iterator[Problem]:
    address = _ADDRESS.match(m.api.http)
    if address is None or not 0 < int(address["port"]) < 65536:
        yield Problem("api.http", m.api.http, "must be host:port with a port from 1 to 65535", "127.0.0.1:8000")
    yield from _grpc(m)
    yield from _least("entrypoint.replicas", m.entrypoint.replicas, 1, "clients need one to talk to")
    yield from _least("entrypoint.attempts_max", m.entrypoint.attempts_max, 1, "the first routing counts as one")
    yield from _positive("entrypoint.deadline", m.entrypoint.deadline, "give a duration such as 10m")
    yield from _positive("entrypoint.wait", m.entrypoint.wait, "give a duration such as 30s")
    c = m.controller
    for name in ("heartbeat", "start_timeout", "drain_timeout", "restart_backoff", "restarts_window"):
        yield from _positive(f"controller.{name}", getattr(c, name), "give a duration such as 500ms")
    if c.lost_after < 2 * c.heartbeat:
        rule = f"must be at least twice controller.heartbeat = {c.heartbeat}"
        yield Problem("controller.lost_after", c.lost_after, rule, "one late heartbeat is no loss; 3s is usual")
    yield from _least("controller.restarts_max", c.restarts_max, 1, "a lost member is started again at least once")


def _grpc(m: Manifest) -> Iterator[Problem]:
    if m.api.grpc is None:
        if m.api.grpc_tls is not None:
            yield Problem("api.grpc_tls", "(given)", "has no meaning without api.grpc", "give api.grpc or remove it")
        return
    address = _ADDRESS.match(m.api.grpc)
    if address is None or not 0 < int(address["port"]) < 65536:
        yield Problem("api.grpc", m.api.grpc, "must be host:port with a port from 1 to 65535", "127.0.0.1:8001")
    elif m.api.grpc == m.api.http:
        yield Problem("api.grpc", m.api.grpc, "must not be api.http", "choose another port")
    elif m.api.keys is None and address["host"] not in _LOOPBACK:
        rule = "must have api.keys where others than this machine can connect"
        yield Problem("api.grpc", m.api.grpc, rule, "whoever connects may read and write every prefix; name a file")
    if m.store is None:
        yield Problem("api.grpc", m.api.grpc, "serves the store, and there is none", "give store, or write null")


def _not_run(m: Manifest) -> Iterator[Problem]:
    """Names of the contract that this version refuses rather than ignores."""
    rule = "is not run by this version"
    if m.device != "cpu":
        yield Problem("device", m.device, rule, "write cpu")
    for name, role in (("prefill", m.prefill), ("decode", m.decode), ("normal", m.normal)):
        if role is None:
            continue
        for field in ("dp", "ep"):
            if getattr(role, field) != 1:
                remedy = f"write {field}: 1 and more groups"
                yield Problem(f"{name}.{field}", getattr(role, field), f"{rule}: a group is one rank", remedy)
        if isinstance(role, Prefill):
            continue
        for field, off in (("verify", "off"), ("zos", False), ("extra_experts", 0)):
            if getattr(role, field) != off:
                word = "false" if off is False else off
                yield Problem(f"{name}.{field}", getattr(role, field), rule, f"write {word}")
    if m.scaling.policy != "off":
        yield Problem("scaling.policy", m.scaling.policy, rule, "write off; shoal keeps the groups asked for")
    for field in ("slo", "prefill", "decode"):
        if getattr(m.scaling, field) is not None:
            yield Problem(f"scaling.{field}", "(given)", "has no effect while scaling.policy is off", "remove it")
