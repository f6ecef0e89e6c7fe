"""Configuration that breaks a rule says field, value, rule and remedy; placement keeps its own rules."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
from shoal.kvstore.config import CodeConfig, DeviceConfig, IndexConfig, TtlConfig
from shoal.kvstore.core.placement import Placement, Slot, check, place
from shoal.kvstore.core.records import TrafficClass
from shoal.kvstore.errors import ConfigError, PlacementError
from store_world import store_config


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda c: CodeConfig(data=0), r"code.data = 0 must be at least 1; 10 is the default"),
        (lambda c: CodeConfig(parity=0), r"code.parity = 0 must be at least 1"),
        (lambda c: CodeConfig(250, 6, 250, 250), r"code.data \+ code.parity = 256 must be at most 255"),
        (lambda c: CodeConfig(ask=9), r"code.ask = 9 must lie between data = 10 and data \+ parity = 12; use 11"),
        (lambda c: CodeConfig(durable_min=13), r"code.durable_min = 13 must lie between"),
        (lambda c: TtlConfig(agent_us=0), r"ttl.agent_us = 0 must be positive; give microseconds"),
        (lambda c: DeviceConfig("a/b", "n", "/x", 1 << 30), r"device.name = 'a/b' must be 1 to 64 bytes"),
        (lambda c: DeviceConfig("a", "n", "/x", 5), r"a.capacity_bytes = 5 must be at least 2 MiB"),
        (lambda c: IndexConfig(0), r"index.capacity_bytes = 0 must be positive; sum the devices"),
        (lambda c: replace(c, devices=c.devices[:11]), r"devices = 11 must be at least .* = 12 devices; add"),
        (lambda c: replace(c, devices=c.devices + c.devices[:1]), r"devices = \['d00'\] must have one name each"),
        (lambda c: replace(c, stripe_bytes=1), r"stripe_bytes = 1 must lie between 64 KiB and 256 MiB"),
        (lambda c: replace(c, buffer_bytes_max=1), r"buffer_bytes_max = 1 must hold one stripe; use 393216"),
        (lambda c: replace(c, segment_bytes=1), r"segment_bytes = 1 must hold 4 fragments"),
        (lambda c: replace(c, slow_us=0), r"slow_us = 0 must be positive"),
    ],
)
def test_a_broken_rule_names_field_value_rule_and_remedy(tmp_path, build, words):
    config = store_config(tmp_path)
    with pytest.raises(ConfigError, match=words):
        build(config)


def test_a_configuration_travels(tmp_path):
    config = store_config(tmp_path)
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_defaults_are_the_published_ones():
    ttl = TtlConfig()
    assert [ttl.of(traffic) // 86_400_000_000 for traffic in (TrafficClass.AGENT, TrafficClass.CHAT)] == [3, 7]
    assert (CodeConfig().data, CodeConfig().parity, CodeConfig().ask) == (10, 2, 11)


def topology(nodes: int, each: int) -> list[Slot]:
    return [Slot(f"n{node}d{disk}", f"n{node}") for node in range(nodes) for disk in range(each)]


def stripe_id(number: int) -> bytes:
    return number.to_bytes(16)


def test_placement_is_pinned():
    """A change of these names is a new PLACEMENT_VERSION."""
    chosen = place(stripe_id(1), topology(4, 4), 12, 11)
    assert chosen.version == 1
    assert ",".join(chosen.devices) == "n1d0,n3d0,n0d2,n2d2,n3d1,n2d1,n1d1,n0d0,n3d3,n2d0,n1d3,n0d1"


def test_placement_does_not_depend_on_the_order_of_devices():
    slots = topology(5, 7)
    assert place(stripe_id(3), slots, 12, 11) == place(stripe_id(3), slots[::-1], 12, 11)


@pytest.mark.parametrize(("nodes", "each"), [(1, 12), (2, 6), (4, 4), (6, 2), (12, 1), (20, 20)])
def test_stripes_lie_on_distinct_devices_evenly_over_nodes(nodes, each):
    slots = topology(nodes, each)
    for number in range(50):
        verdict = check(place(stripe_id(number), slots, 12, 11), slots, parity=2)
        assert verdict.is_valid, verdict.reasons
        assert verdict.fragments_per_node_max == -(-12 // nodes)
        assert verdict.survives_node_loss == (nodes >= 6)


def test_load_and_rebuild_load_are_shared():
    slots = topology(6, 10)
    placements = [place(stripe_id(number), slots, 12, 11).devices for number in range(3_000)]
    load = Counter(device for devices in placements for device in devices)
    assert len(load) == 60
    assert max(load.values()) < 1.25 * min(load.values())
    partners = Counter(d for devices in placements if "n0d0" in devices for d in devices if d != "n0d0")
    others = [partners[slot.device] for slot in slots if slot.node != "n0"]
    assert min(others) > 0
    assert max(others) < 2 * min(others)


def test_a_lost_device_moves_only_its_own_fragments():
    slots = topology(12, 2)
    less = [slot for slot in slots if slot.device != "n3d1"]
    for number in range(200):
        before = place(stripe_id(number), slots, 12, 11).devices
        after = place(stripe_id(number), less, 12, 11).devices
        assert len(set(before) - set(after)) == ("n3d1" in before)


def test_too_few_devices_leave_parity_out_and_then_refuse():
    slots = topology(11, 1)
    chosen = place(stripe_id(5), slots, 12, 11)
    assert chosen.devices.count(None) == 1
    assert "so 1 further losses are survived" in check(chosen, slots, 2).reasons[3]
    with pytest.raises(PlacementError, match="needs 11 devices that take writes, 10 are left; free or replace"):
        place(stripe_id(5), slots[:10], 12, 11)


def test_check_explains_what_is_wrong():
    slots = topology(2, 2)
    verdict = check(Placement(1, ("n0d0", "n0d0", "elsewhere")), slots, 1)
    assert not verdict.is_valid
    assert "unknown devices: ['elsewhere']" in verdict.reasons
    assert "devices that hold two fragments: ['n0d0']" in verdict.reasons
    assert "NOT survived" in verdict.reasons[-1]
