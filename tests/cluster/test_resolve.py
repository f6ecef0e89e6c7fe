"""Resolved clusters, plans and quantities: nothing automatic remains, and every field has its effect."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from shoal.cluster.cli import app
from shoal.cluster.facts import Facts, MachineFacts, ModelFacts
from shoal.cluster.manifest import decode_manifest, read_manifest
from shoal.cluster.plan import make_plan
from shoal.cluster.quantities import Duration, Size
from shoal.cluster.resolve import resolve
from shoal.engines.config import Determinism, Role, TruncationMode
from typer.testing import CliRunner

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
MODEL = ModelFacts("m", 8192, 128, 6, 128, 1000, 2000, 1500, 64, 10_000, 5_000, 1000, 5)
FACTS = Facts(MODEL, MachineFacts(64 << 30, 1 << 40, 2))


def local():
    return resolve(read_manifest(MANIFESTS / "local.yaml"), FACTS, "local.yaml")


def test_local_has_every_role():
    cluster = local()
    assert [g.name for g in cluster.groups] == ["prefill/0", "prefill/1", "decode/0", "decode/1"]
    assert [g.engine.role for g in cluster.groups] == [Role.PROMPT] * 2 + [Role.COMPLETION] * 2
    assert [e.name for e in cluster.encoders] == ["encoder/0"]
    assert cluster.store is not None
    assert cluster.store.nodes * cluster.store.devices_per_node == 12
    assert cluster.policy.keep == 134
    assert not cluster.is_normal


def test_auto_becomes_numbers():
    prefill = local().groups[0].engine
    assert prefill.truncation.keep == 134  # window + backtracking
    assert prefill.truncation.mode is TruncationMode.COMPACT
    assert prefill.cache.blocks_count == 1 + 4 * 32  # null, and four sequences of 4096 tokens
    assert prefill.cache.slots_count >= 5
    assert "auto" not in local().to_yaml()


def test_drafts_of_decode_reach_both_roles_and_the_memory_plan():
    text = "kind: Cluster\nname: x\nprefill: {groups: 1}\ndecode: {groups: 1, sequences_max: 4, drafts: 5}\n"
    cluster = resolve(decode_manifest(text, "x.yaml"), FACTS, "x.yaml")
    prefill, decode = (group.engine for group in cluster.groups)
    assert prefill.drafts == decode.drafts == 5
    assert decode.step_tokens_max == 4 * 6
    assert decode.cache.blocks_count == 1 + 4 * 33  # 4096 tokens and five drafts
    plan = make_plan(cluster, FACTS)
    assert [member.drafts_bytes for member in plan.members[:2]] == [0, (4 + 1) * 5 * 1000 * 4]


@pytest.mark.parametrize("asked", ["", *Determinism])
def test_every_engine_promises_what_the_manifest_asks(asked):
    text = "kind: Cluster\nname: x\nprefill: {groups: 1}\ndecode: {groups: 1}\n" + (asked and f"determinism: {asked}\n")
    cluster = resolve(decode_manifest(text, "x.yaml"), FACTS, "x.yaml")
    assert {group.engine.determinism for group in cluster.groups} == {asked or Determinism.BATCH_INVARIANT}


def test_normal_has_one_engine_and_no_hand_off():
    cluster = resolve(read_manifest(MANIFESTS / "normal.yaml"), FACTS, "normal.yaml")
    assert [g.engine.role for g in cluster.groups] == [Role.NORMAL]
    assert cluster.is_normal
    assert cluster.transfer is None
    assert cluster.policy.keep == 0  # no store, so nothing is matched


def test_resolved_yaml_reads_back():
    tree = yaml.safe_load(local().to_yaml())
    assert tree["store"]["ttl_us"] == [
        ["agent", 259_200_000_000],
        ["chat", 604_800_000_000],
        ["default", 86_400_000_000],
    ]
    assert tree["groups"][2]["engine"]["role"] == "completion"


def test_off_is_a_word():
    text = "kind: Cluster\nname: x\nnormal: {truncation: {mode: off}, verify: off}\nscaling: {policy: off}\n"
    assert decode_manifest(text, "x").normal.truncation.mode == "off"


def test_plan_counts_every_pool():
    plan = make_plan(local(), FACTS)
    first = plan.members[0]
    assert first.blocks_bytes == 129 * 1000
    assert first.weights_bytes == 10_000
    caches = {member.name: member.cache_bytes for member in plan.members if not member.name.startswith("encoder")}
    assert caches == {"prefill/0": 64 << 20, "prefill/1": 64 << 20, "decode/0": 0, "decode/1": 0}
    assert plan.handoff_bytes == 32 * 1000 + 2000
    assert plan.store.usable_bytes == (1 << 30) * 10 // 12
    assert not plan.refusals
    assert json.loads(json.dumps(plan.to_json()))["store"]["losses_survived"] == 2


def test_plan_refuses_what_does_not_fit():
    small = replace(FACTS, machine=MachineFacts(1 << 20, 1 << 20, 2))
    refusals = make_plan(local(), small).refusals
    assert len(refusals) == 2
    assert "the machine has 1.0 MiB; lower sequences_max, max_model_len or groups" in refusals[0]
    assert refusals[1].startswith("store.capacity = 1GiB, the disk has 1.0 MiB free")


@given(st.integers(0, 10**16))
def test_durations_print_as_they_are_read(us):
    assert Duration.parse(str(Duration(us))) == us


@pytest.mark.parametrize(("text", "us"), [("3d 12h", 302_400_000_000), ("250ms", 250_000), ("1.5s", 1_500_000)])
def test_durations(text, us):
    assert Duration.parse(text) == us


@pytest.mark.parametrize(("text", "size"), [("64MiB", 64 << 20), ("1.5TB", 1_500_000_000_000), ("7B", 7)])
def test_sizes(text, size):
    assert Size.parse(text) == size
    assert Size.parse(str(Size(size))) == size


@pytest.mark.parametrize("text", ["", "3", "s", "3 weeks", "-1s", "3s,4s", "0.5us", None, 3, True])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="must be a duration such as"):
        Duration.parse(text)


def test_commands_print_and_refuse(tmp_path):
    runner = CliRunner()
    good = runner.invoke(app, ["validate", str(MANIFESTS / "local.yaml")])
    assert good.exit_code == 0, good.output
    assert yaml.safe_load(good.output)["name"] == "local"
    planned = runner.invoke(app, ["plan", str(MANIFESTS / "normal.yaml"), "--json"])
    assert json.loads(planned.output)["members"][0]["name"] == "normal/0"
    bad = tmp_path / "bad.yaml"
    bad.write_text("kind: Cluster\nname: x\nnormal: {groups: 0}\n")
    refused = runner.invoke(app, ["validate", str(bad)])
    assert refused.exit_code == 2
    assert f"{bad}: normal.groups = 0 must be at least 1" in refused.output
    assert "Traceback" not in refused.output
    bad.write_text("kind: Cluster\nname: x\nnormal: {}\nmodel: {path: /nowhere}\n")
    assert runner.invoke(app, ["plan", str(bad)]).exit_code == 2
