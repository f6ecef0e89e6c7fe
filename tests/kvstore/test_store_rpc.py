"""The store over gRPC, client and server on this machine: what a foreign engine sees, rule by rule."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore.store_world import ANCHOR_BYTES, GRAIN_BYTES, World, payload, prompt, prompt_objects
from shoal.kvstore.client import StoreClient
from shoal.kvstore.core.records import Kind, TrafficClass
from shoal.kvstore.errors import ConfigError, ObjectError
from shoal.kvstore.io.isal import IsalCode
from shoal.kvstore.local import LocalIndex
from shoal.kvstore.rpc import store_pb2 as pb
from shoal.kvstore.rpc.client import RemoteStore, RemoteStoreError
from shoal.kvstore.rpc.leases import Leases
from shoal.kvstore.rpc.messages import KEYS_MAX, PART_BYTES
from shoal.kvstore.rpc.server import Security, StoreServer
from shoal.kvstore.rpc.service import Limits, StoreServicer

ROOM = Limits(call_s=20.0, object_bytes_max=4 << 20, put_bytes_max=6 << 20, part_grains=4)


class Gateway:
    """A store world behind a server, and a client of it."""

    def __init__(self, folder: Path, security: Security | None = None, index=None, **changes) -> None:
        self.world = World(folder, **changes)
        self.index = index or LocalIndex(self.world.index)
        self.servicer = StoreServicer(self.world.client, self.index, "gateway/0@1", self.world.clock, ROOM, "0.0")
        self.server = StoreServer(self.servicer, "127.0.0.1:0", security or Security())
        self.address = f"127.0.0.1:{self.server.port}"
        self.remote = RemoteStore(self.address, timeout_s=10.0)

    def close(self) -> None:
        self.remote.close()
        self.server.close()
        self.world.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path)
    yield gateway
    gateway.close()


def test_what_is_put_is_matched_and_fetched(gateway: Gateway) -> None:
    keys = prompt(21)
    assert gateway.remote.missing(keys) == (True,) * 21
    done = gateway.remote.put(prompt_objects(keys, anchors=(8, 16)))
    assert (done.saved, done.new, done.failed, done.reasons) == (23, 23, 0, ())
    assert gateway.remote.missing(keys) == (False,) * 21
    match = gateway.remote.match(keys, 20 * 128, TrafficClass.AGENT)
    assert (match.grains_matched, match.anchor_grain, match.boot_id) == (21, 16, "boot1")
    assert gateway.remote.match(keys).anchor_grain == 16
    fetched = gateway.remote.fetch(keys, 16)
    assert [bytes(g) for g in fetched.grains] == [payload(k, Kind.GRAIN, GRAIN_BYTES) for k in keys]
    assert bytes(fetched.anchor) == payload(keys[15], Kind.ANCHOR, ANCHOR_BYTES)
    assert (fetched.anchor_grain, fetched.reason) == (16, "")
    stats = gateway.remote.stats()
    assert (stats.grains, stats.anchors, stats.version) == (21, 2, "0.0")
    assert gateway.world.index.usage().pins == 0


def test_a_cluster_and_a_stranger_share_what_they_store(gateway: Gateway) -> None:
    """What was saved inside is fetched outside, and the other way round."""
    inside, outside = prompt(6, seed=1), prompt(6, seed=2)
    gateway.world.save(prompt_objects(inside, anchors=(6,)))
    gateway.remote.put(prompt_objects(outside, anchors=(6,)))
    assert gateway.remote.fetch(inside, 6) == gateway.world.fetch(inside, 6)
    assert gateway.remote.fetch(outside, 6).grains == gateway.world.fetch(outside, 6).grains


def test_a_long_object_travels_in_parts(gateway: Gateway) -> None:
    [key] = prompt(1)
    raw = payload(key, Kind.GRAIN, 2 * PART_BYTES + 17)
    [item] = prompt_objects((key,))
    gateway.remote.put([replace(item, payload=raw)])
    assert bytes(gateway.remote.fetch((key,), 0).grains[0]) == raw


def test_a_shorter_prefix_says_why_and_brings_the_anchor_within_it(gateway: Gateway) -> None:
    keys = prompt(12)
    gateway.remote.put(prompt_objects(keys[:9], anchors=(4, 8)))
    fetched = gateway.remote.fetch(keys, 12)
    assert (len(fetched.grains), fetched.anchor_grain, fetched.reason) == (9, 8, "9 of 12 grains stored")
    nothing = gateway.remote.fetch(prompt(2, seed=9), 0)
    assert (nothing.grains, nothing.reason) == ((), "0 of 2 grains stored")


@pytest.mark.parametrize("lost", range(4))
def test_lost_devices_are_a_shorter_prefix_and_no_error(tmp_path: Path, lost: int) -> None:
    gateway = Gateway(tmp_path)
    keys = prompt(30)
    gateway.remote.put(prompt_objects(keys, anchors=(4,)))
    for device in gateway.world.config.devices[:lost]:
        gateway.world.lose_directory(device.name)
    fetched = gateway.remote.fetch(keys, 4)
    if lost <= 2:
        assert (len(fetched.grains), fetched.reason) == (30, "")
    else:
        assert len(fetched.grains) < 30
        assert "lost" in fetched.reason
    assert [bytes(g) for g in fetched.grains] == [
        payload(k, Kind.GRAIN, GRAIN_BYTES) for k in keys[: len(fetched.grains)]
    ]
    assert gateway.world.index.usage().pins == 0
    gateway.close()


def test_a_pin_keeps_a_prefix_until_its_release_or_the_end_of_its_lease(gateway: Gateway) -> None:
    keys = prompt(5)
    gateway.remote.put(prompt_objects(keys, anchors=(3,)))
    first, second = gateway.remote.pin(keys, 10.0), gateway.remote.pin((*keys, prompt(1, seed=4)[0]), 10.0)
    assert (first.grains, first.anchor_grain, second.grains) == (5, 3, 5)
    assert gateway.world.index.usage().pins == gateway.remote.stats().pins == 2
    assert gateway.remote.release(first.pin)
    assert not gateway.remote.release(first.pin)
    assert not gateway.remote.release(second.pin ^ 1)
    gateway.world.clock.us += 10_000_000
    assert gateway.servicer.end_overdue() == 1
    assert not gateway.remote.release(second.pin)
    assert gateway.world.index.usage().pins == 0
    assert gateway.remote.pin(prompt(1, seed=5), 1.0).pin == 0


KEY = prompt(1)[0]
HEAD = {"kind": pb.KIND_GRAIN, "key": KEY, "parent": bytes(16), "grain_index": 0, "length": 4}
BAD_PUTS = {
    "kind": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"kind": 0}))], "object 0: kind = 0 must be KIND_GRAIN"),
    "key": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"key": b"short"}))], "object 0: key has 5 bytes"),
    "parent": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"parent": KEY}))], "does not fit grain_index = 0"),
    "no parent": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"grain_index": 1}))], "does not fit grain_index = 1"),
    "empty": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"length": 0}))], "length = 0 must lie in 1 to 4194304"),
    "huge": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"length": 1 << 40}))], "must lie in 1 to 4194304 bytes"),
    "class": ([pb.PutPart(head=pb.ObjectHead(**HEAD | {"traffic": 7}))], "object 0: traffic = 7 is not known"),
    "no head": ([pb.PutPart(data=b"x")], "object 0: bytes came before its head"),
    "too much": ([pb.PutPart(head=pb.ObjectHead(**HEAD), data=b"12345")], "5 bytes came, its head announced"),
    "too little": ([pb.PutPart(head=pb.ObjectHead(**HEAD), data=b"123")], "the put ends after 3 of length = 4"),
    "second head": (
        [pb.PutPart(head=pb.ObjectHead(**HEAD), data=b"123"), pb.PutPart(head=pb.ObjectHead(**HEAD))],
        "object 0 begins after 3 of length = 4 bytes",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("shared"))
    yield gateway
    gateway.close()


@pytest.mark.parametrize(("parts", "words"), BAD_PUTS.values(), ids=BAD_PUTS)
def test_a_put_that_breaks_a_rule_is_refused_by_name(shared: Gateway, parts: list[pb.PutPart], words: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        shared.remote._put(iter(parts), timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in refused.value.details()
    assert shared.servicer._budget.taken == 0
    assert shared.remote.stats().grains == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.match(()), "keys is empty"),
        (lambda r: r.match((KEY, b"x")), "keys[1] has 1 bytes, must have 16"),
        (lambda r: r.missing((KEY,) * (KEYS_MAX + 1)), f"more than {KEYS_MAX}"),
        (lambda r: r.fetch((KEY,), 2), "anchor_grain = 2 must be at most the 1 keys given"),
        (lambda r: r.pin((KEY,), 0.0), "lease_ms = 0 must lie in 1 to 600000"),
        (lambda r: r.pin((KEY,), 3600.0), "lease_ms = 3600000 must lie in 1 to 600000"),
    ],
)
def test_a_question_that_breaks_a_rule_is_refused_by_name(shared: Gateway, call, words: str) -> None:
    with pytest.raises(ObjectError) as refused:
        call(shared.remote)
    assert words in str(refused.value)


@settings(max_examples=40, deadline=None)
@given(verb=st.sampled_from(["_match", "_missing", "_pin", "_release", "_put"]), raw=st.binary(max_size=200))
def test_any_bytes_are_answered_or_refused_and_the_service_stays_up(shared: Gateway, verb: str, raw: bytes) -> None:
    name = verb[1:].capitalize()
    make = shared.remote._channel.stream_unary if verb == "_put" else shared.remote._channel.unary_unary
    call = make(f"/shoal.store.v1.Store/{name}", lambda value: value, lambda value: value)
    told = grpc.StatusCode.OK
    try:
        call(iter([raw]) if verb == "_put" else raw, timeout=5)
    except grpc.RpcError as error:
        told = error.code()
    assert told in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert shared.servicer._budget.taken == 0
    assert shared.remote.stats().version == "0.0"
    wait_for(lambda: not shared.server._server._state.rpc_states)  # a refused call is not kept


def test_more_than_the_gateway_may_hold_is_told_to_wait(gateway: Gateway) -> None:
    keys = prompt(4)
    many = [replace(item, payload=bytes(2 << 20)) for item in prompt_objects(keys)]
    with pytest.raises(RemoteStoreError, match=r"RESOURCE_EXHAUSTED.*do not fit in 6291456; wait, or put fewer"):
        gateway.remote.put(many)
    assert gateway.servicer._budget.taken == 0
    assert gateway.remote.put(many[:2]).saved == 2


class SilentIndex(LocalIndex):
    """Answers nothing until it is told to."""

    def __init__(self, service) -> None:
        super().__init__(service)
        self.waiting: list[tuple[Future, object]] = []
        self.is_silent = False
        self.located = threading.Event()

    def locate(self, keys, owner):
        answer = super().locate(keys, owner)
        if not self.is_silent:
            return answer
        late: Future = Future()
        self.waiting.append((late, answer.result()))
        self.located.set()
        return late


def test_a_pin_that_comes_too_late_is_let_go(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    gateway.servicer._index = index = SilentIndex(gateway.world.index)
    keys = prompt(3)
    gateway.remote.put(prompt_objects(keys))
    index.is_silent = True
    hasty = RemoteStore(gateway.address, timeout_s=0.3)
    with pytest.raises(RemoteStoreError, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
        hasty.pin(keys, 5.0)
    hasty.close()
    assert gateway.world.index.usage().pins == 1
    gateway.server.close()  # whatever the call was doing has ended
    [(late, answer)] = index.waiting
    late.set_result(answer)
    assert gateway.world.index.usage().pins == 0
    gateway.remote.close()
    gateway.world.close()


def test_a_cancelled_fetch_lets_its_prefix_go(gateway: Gateway) -> None:
    keys = prompt(40)
    gateway.remote.put(prompt_objects(keys))
    for device in gateway.world.config.devices:  # nothing answers: the fetch hangs in its first stripes
        gateway.world.node_of(device.name).held[device.name] = []
    gateway.world.restart_client()
    gateway.servicer._client = gateway.world.client
    call = gateway.remote._fetch(pb.FetchRequest(keys=keys), timeout=10)
    wait_for(lambda: gateway.world.index.usage().pins == 1)
    call.cancel()
    wait_for(lambda: gateway.world.index.usage().pins == 0)
    assert gateway.remote.stats().grains == 40


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come true within 10 s")


def test_tokens(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, Security(tokens=("first", "second")))
    for token in ("", "third", "firs"):
        with RemoteStore(gateway.address, token) as remote, pytest.raises(RemoteStoreError, match="UNAUTHENTICATED"):
            remote.stats()
        with RemoteStore(gateway.address, token) as remote, pytest.raises(RemoteStoreError, match="UNAUTHENTICATED"):
            remote.put(prompt_objects(prompt(1)))
    for token in ("first", "second"):
        with RemoteStore(gateway.address, token) as remote:
            assert remote.stats().grains == 0
    with grpc.insecure_channel(gateway.address) as channel:
        probe = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="shoal.store.v1.Store")
        assert probe.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
        gateway.server.set_serving(False)
        assert probe.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
    gateway.close()


def test_tls(tmp_path: Path) -> None:
    """Who trusts the gateway's certificate gets in; who speaks plain text or trusts another authority does not."""
    authority, stranger = trustme.CA(), trustme.CA()
    identity = authority.issue_cert("127.0.0.1")
    key, [certificate] = identity.private_key_pem.bytes(), [pem.bytes() for pem in identity.cert_chain_pems]
    gateway = Gateway(tmp_path, Security(("secret",), certificate, key))
    trusted = authority.cert_pem.bytes()
    with RemoteStore(gateway.address, "secret", root_certificate=trusted) as remote:
        assert remote.stats().version == "0.0"
    with (
        RemoteStore(gateway.address, "wrong", root_certificate=trusted) as remote,
        pytest.raises(RemoteStoreError, match="UNAUTHENTICATED"),
    ):
        remote.stats()
    for other in (None, stranger.cert_pem.bytes()):
        with (
            RemoteStore(gateway.address, "secret", root_certificate=other, timeout_s=2.0) as remote,
            pytest.raises(RemoteStoreError, match=r"UNAVAILABLE|DEADLINE_EXCEEDED"),
        ):
            remote.stats()
    gateway.close()


def test_a_taken_address_and_half_an_identity_are_refused(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match=r"address = '127.0.0.1:\d+' cannot be bound"):
        StoreServer(gateway.servicer, gateway.address, Security())
    with pytest.raises(ConfigError, match="TLS needs certificate and key"):
        Security(certificate=b"x")


def test_leases_end_once_and_in_order() -> None:
    leases = Leases()
    for lease, pin, end in ((11, 1, 300), (12, 2, 100), (13, 3, 200)):
        leases.add(lease, pin, end)
    assert leases.release(13) == 3
    assert leases.release(13) is None
    assert leases.ended(99) == ()
    assert leases.ended(300) == (2, 1)
    assert (leases.ended(10**9), len(leases)) == ((), 0)


def test_the_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    from grpc_tools import protoc

    folder = Path(pb.__file__).parent
    words = ["protoc", f"-I{folder}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", str(folder / "store.proto")]
    assert protoc.main(words) == 0
    serialized = [line for line in (tmp_path / "store_pb2.py").read_text().splitlines() if "AddSerializedFile" in line]
    assert serialized[0] in (folder / "store_pb2.py").read_text()


def test_a_fetch_in_parts_is_the_fetch(tmp_path: Path) -> None:
    """The same grains, anchor and reason, whatever the pieces; each stripe is read once."""
    world = World(tmp_path)
    keys = prompt(50)
    world.save(prompt_objects(keys[:44], anchors=(10, 40)))
    for part_grains in (1, 7, 50):
        whole = StoreClient(
            (LocalIndex(world.index), world.nodes), world.config, IsalCode(), world.sums, world.clock, "a"
        )
        deadline_us = world.clock() + 10**7
        expected = whole.fetch(keys, 42, deadline_us)
        for node in world.nodes.values():
            node.reads.clear()
        parts = list(whole.fetch_parts(keys, 42, deadline_us, threading.Event(), part_grains))
        grains = tuple(grain for part in parts for grain in part.grains)
        assert (grains, parts[-1].anchor_grain, parts[-1].anchor) == (
            expected.grains, expected.anchor_grain, expected.anchor,
        )  # fmt: skip
        assert parts[-1].reason == expected.reason == "44 of 50 grains stored"
        reads = [device for node in world.nodes.values() for device in node.reads]
        stripes = world.index.usage().stripes
        assert len(reads) == world.config.code.ask * (stripes + 1), part_grains  # the anchor's once more
    world.close()
