"""Every rule of a manifest, with the exact text an operator reads."""

from dataclasses import replace

import pytest
from shoal.cluster.errors import ManifestError
from shoal.cluster.facts import Facts, MachineFacts, ModelFacts
from shoal.cluster.manifest import decode_manifest, read_manifest
from shoal.cluster.resolve import resolve

PD = "kind: Cluster\nname: x\nprefill: {groups: 1}\ndecode: {groups: 1}\n"
NORMAL = "kind: Cluster\nname: x\nnormal: {}\n"
STORE = PD + "store: "
FACTS = Facts(
    ModelFacts("m", 8192, 128, 6, 128, 1000, 2000, 1500, 64, 10_000, 5_000, 1000, 5), MachineFacts(1 << 30, 1 << 34, 2)
)

RULES = [
    ("kind: Experiment\n", "kind = Experiment must be Cluster; this command reads clusters"),
    ("- 1\n", "the document = list must be a mapping with kind and name; see manifests/local.yaml"),
    (PD + "name: y\n", "line 5, column 1 = name: y is not YAML we read: key 'name' stands twice; correct it"),
    ("kind: Cluster\nname: [\n", "line 3, column 1 = (end of file) is not YAML we read: expected the node content, "
     "but found '<stream end>'; correct it"),
    ("kind: Cluster\nprefill: {groups: 1}\n", "name = null must be given; add name under the document"),
    (PD + "modle: 1\n", "modle = 1 is not a known key; did you mean model?"),
    (PD + "model: {file: x}\n", "model.file = x is not a known key; known keys: max_model_len, path"),
    ("kind: Cluster\nname: x\nprefill: {}\n", "prefill.groups = null must be given; add groups under prefill"),
    ("kind: Cluster\nname: x\nprefill: {groups: two}\n",
     "prefill.groups = two must be a whole number, not text; correct the type"),
    (PD + "device: tpu\n", "device = tpu must be one of cpu, cuda; choose one of them"),
    (STORE + "{capacity: 4}\n", "store.capacity = 4 must be a size such as 64MiB or 1.5TB (units B, kB..PB, "
     "KiB..PiB), not int; correct the value"),
    (STORE + "{ttl: {chat: 3 weeks}}\n", "store.ttl.chat = 3 weeks must be a duration such as 30s, 250ms or 3d 12h "
     "(units d, h, m, s, ms, us); correct the value"),
    (PD.replace("name: x", "name: My_Cluster"), "name = My_Cluster must be a lower-case name of letters, digits and "
     "dashes, at most 39 long; it becomes the Ray namespace; write for example local"),
    (PD + "model: {path: ''}\n", "model.path =  must not be empty; give builtin:toy or a checkpoint directory"),
    (PD + "model: {path: 'builtin:big'}\n",
     "model.path = builtin:big is not a built-in model; use builtin:toy or a directory"),
    (PD + "model: {max_model_len: 1}\n",
     "model.max_model_len = 1 must be at least 2; a prompt token and an output token need 2"),
    (PD + "encoders: {replicas: -1}\n",
     "encoders.replicas = -1 must be at least 0; 0 refuses images, 1 or more encodes them"),
    (PD + "encoders: {cache: 0B}\n", "encoders.cache = 0B must be more than 0; give a size such as 64MiB"),
    (PD + "normal: {}\n",
     "normal = (given) cannot stand beside prefill and decode; keep either normal, or prefill and decode"),
    ("kind: Cluster\nname: x\nprefill: {groups: 1}\n",
     "decode = null must be given; give prefill and decode, or normal for one engine that does both"),
    ("kind: Cluster\nname: x\n",
     "prefill = null must be given; give prefill and decode, or normal for one engine that does both"),
    (PD.replace("prefill: {groups: 1}", "prefill: {groups: 0}"),
     "prefill.groups = 0 must be at least 1; a cluster needs a group of each role it names"),
    (NORMAL.replace("{}", "{sequences_max: 0}"),
     "normal.sequences_max = 0 must be at least 1; an engine runs at least one sequence"),
    (NORMAL.replace("{}", "{blocks: 1}"),
     "normal.blocks = 1 must be at least 2; id 0 is null, so 2 is the smallest pool; or write auto"),
    (NORMAL.replace("{}", "{slots: 1}"),
     "normal.slots = 1 must be at least 2; id 0 is null, so 2 is the smallest pool; or write auto"),
    (NORMAL.replace("{}", "{step_tokens_max: 0}"),
     "normal.step_tokens_max = 0 must be at least 1; a step computes at least one token"),
    (NORMAL.replace("{}", "{truncation: {keep: 0}}"),
     "normal.truncation.keep = 0 must be at least 1; write auto for window + backtracking"),
    (PD + "balancers: {prefill: {queue: -1}}\n",
     "balancers.prefill.queue = -1.0 must be 0 or more; 0 turns the term off"),
    (PD + "balancers: {decode: {base_us: 0}}\n",
     "balancers.decode.base_us = 0.0 must be more than 0; it serves until a group has measured its own"),
    (PD + "balancers: {prefill: {locality: 2}}\n",
     "balancers.prefill.locality = 2.0 must be at most 1; it is the share of a cost saved"),
    (PD + "balancers: {queue_max: 0}\n",
     "balancers.queue_max = 0 must be at least 1; a request waits in a queue, if only for a moment"),
    (NORMAL + "transfer: {}\n",
     "transfer = (given) has no meaning with normal; one engine hands nothing off; remove it"),
    (PD + "transfer: {lease: 900ms}\n", "transfer.lease = 900ms must be at least twice controller.heartbeat = 500ms; "
     "leases are renewed by heartbeat; 30s is usual"),
    (STORE + "{nodes: 0}\n", "store.nodes = 0 must be at least 1; remove the section to run without a store"),
    (STORE + "{devices_per_node: 0}\n",
     "store.devices_per_node = 0 must be at least 1; each node owns a directory or more"),
    (STORE + "{code: {data: 0, parity: 2, ask: 1}}\n",
     "store.code.data = 0 must be at least 1; a stripe has at least one data shard; 10 is usual"),
    (STORE + "{code: {data: 10, parity: 0, ask: 10}}\n",
     "store.code.parity = 0 must be at least 1; without parity one bad byte loses the stripe; 2 is usual"),
    (STORE + "{nodes: 9, code: {data: 31, parity: 2, ask: 31}}\n",
     "store.code = 31+2 must be at most 32 shards; 10+2"),
    (STORE + "{nodes: 2}\n", "store.nodes = 2 x devices_per_node = 4 gives 8 devices, fewer than the 12 shards; shards "
     "of a stripe never share a device: add nodes or devices, or a smaller code"),
    (STORE + "{code: {ask: 9}}\n", "store.code.ask = 9 must be from data = 10 to data + parity = 12; one more than "
     "data hides one slow device"),
    (STORE + "{code: {ask: 13}}\n", "store.code.ask = 13 must be from data = 10 to data + parity = 12; one more than "
     "data hides one slow device"),
    (STORE + "{capacity: 0B}\n", "store.capacity = 0B must be more than 0; give a size such as 4GiB"),
    (STORE + "{ttl: {agent: 0s}}\n", "store.ttl.agent = 0s must be more than 0; give a duration such as 1d"),
    (STORE.replace("prefill: {groups: 1}", "prefill: {groups: 1, truncation: {mode: off}}") + "{}\n",
     "prefill.truncation.mode = off must not be off while store is on; a stored anchor lies before the kept rows; use "
     "compact or mask, or remove the store"),
    (PD + "api: {http: ':80'}\n",
     "api.http = :80 must be host:port with a port from 1 to 65535; 127.0.0.1:8000"),
    (PD + "api: {http: 'h:70000'}\n",
     "api.http = h:70000 must be host:port with a port from 1 to 65535; 127.0.0.1:8000"),
    (PD + "entrypoint: {replicas: 0}\n",
     "entrypoint.replicas = 0 must be at least 1; clients need one to talk to"),
    (PD + "entrypoint: {attempts_max: 0}\n",
     "entrypoint.attempts_max = 0 must be at least 1; the first routing counts as one"),
    (PD + "entrypoint: {deadline: 0s}\n",
     "entrypoint.deadline = 0s must be more than 0; give a duration such as 10m"),
    (PD + "entrypoint: {wait: 0s}\n", "entrypoint.wait = 0s must be more than 0; give a duration such as 30s"),
    (PD + "controller: {start_timeout: 0s}\n",
     "controller.start_timeout = 0s must be more than 0; give a duration such as 500ms"),
    (PD + "controller: {lost_after: 900ms}\n", "controller.lost_after = 900ms must be at least twice "
     "controller.heartbeat = 500ms; one late heartbeat is no loss; 3s is usual"),
    (PD + "controller: {restarts_max: 0}\n",
     "controller.restarts_max = 0 must be at least 1; a lost member is started again at least once"),
    (PD + "device: cuda\n", "device = cuda is not run by this version; write cpu"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, dp: 2}"),
     "decode.dp = 2 is not run by this version: a group is one rank; write dp: 1 and more groups"),
    (PD.replace("prefill: {groups: 1}", "prefill: {groups: 1, ep: 2}"),
     "prefill.ep = 2 is not run by this version: a group is one rank; write ep: 1 and more groups"),
    (PD.replace("prefill: {groups: 1}", "prefill: {groups: 1, step_time_budget: soon}"),
     "prefill.step_time_budget = soon must be off, auto or a duration such as 250ms; auto: as long as "
     "step_tokens_max rows take"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, drafts: -1}"),
     "decode.drafts = -1 must be at least 0; write 0 for no drafts"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, verify: varlen}"),
     "decode.verify = varlen is not run by this version; write off"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, zos: true}"),
     "decode.zos = true is not run by this version; write false"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, extra_experts: 1}"),
     "decode.extra_experts = 1 is not run by this version; write 0"),
    (PD + "api: {grpc: '127.0.0.1:8001'}\n",
     "api.grpc = 127.0.0.1:8001 serves the store, and there is none; give store, or write null"),
    (PD + "api: {grpc: ':8001'}\n",
     "api.grpc = :8001 must be host:port with a port from 1 to 65535; 127.0.0.1:8001"),
    (PD + "api: {grpc: '127.0.0.1:8000'}\n",
     "api.grpc = 127.0.0.1:8000 must not be api.http; choose another port"),
    (PD + "api: {grpc: '0.0.0.0:8001'}\n",
     "api.grpc = 0.0.0.0:8001 must have api.keys where others than this machine can connect; "
     "whoever connects may read and write every prefix; name a file"),
    (PD + "api: {grpc_tls: {certificate: a, key: b}}\n",
     "api.grpc_tls = (given) has no meaning without api.grpc; give api.grpc or remove it"),
    (PD + "scaling: {policy: on}\n",
     "scaling.policy = on is not run by this version; write off; shoal keeps the groups asked for"),
    (PD + "scaling: {slo: {ttft: 2s}}\n",
     "scaling.slo = (given) has no effect while scaling.policy is off; remove it"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), RULES, ids=[message[:40] for _, message in RULES])
def test_each_rule_names_file_path_value_rule_and_remedy(text, message):
    with pytest.raises(ManifestError) as caught:
        decode_manifest(text, "manifests/x.yaml")
    assert f"manifests/x.yaml: {message}" in str(caught.value).splitlines()


FACT_RULES = [
    (PD + "model: {max_model_len: 9000}\n",
     "model.max_model_len = 9000 must be at most 8192, the positions of m; lower it"),
    (PD.replace("prefill: {groups: 1}", "prefill: {groups: 1, truncation: {keep: 133}}"),
     "prefill.truncation.keep = 133 must be at least 134: window 128 + backtracking 6; write auto"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, blocks: 32}"), "decode.blocks = 32 must be at least 33 to "
     "hold one sequence of model.max_model_len = 4096; write auto, or shorten max_model_len"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, slots: 16}"), "decode.slots = 16 must be at least "
     "sequences_max + 1 = 17; write auto: slot 0 is null, each sequence has its own"),
    (PD.replace("decode: {groups: 1}", "decode: {groups: 1, drafts: 6}"),
     "decode.drafts = 6 must be at most 5, the block of the drafter of m; write 5"),
    (NORMAL.replace("{}", "{drafts: 5, step_tokens_max: 95}"), "normal.step_tokens_max = 95 must be at least "
     "sequences_max * (1 + drafts) = 96, the rows of a decode step; raise it, or lower one of the two"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FACT_RULES, ids=[message[:30] for _, message in FACT_RULES])
def test_each_rule_that_needs_facts(text, message):
    with pytest.raises(ManifestError) as caught:
        resolve(decode_manifest(text, "x.yaml"), FACTS, "x.yaml")
    assert str(caught.value).splitlines() == [f"x.yaml: {message}"]


def test_a_blind_checkpoint_refuses_encoders():
    blind = replace(FACTS, model=replace(FACTS.model, vision_bytes=0))
    with pytest.raises(ManifestError) as caught:
        resolve(decode_manifest(PD, "x.yaml"), blind, "x.yaml")
    assert str(caught.value) == "x.yaml: encoders.replicas = 1 needs vision weights, which m lacks; write 0"


def test_a_checkpoint_without_drafter_refuses_drafts():
    plain = replace(FACTS, model=replace(FACTS.model, drafts_max=0))
    with pytest.raises(ManifestError) as caught:
        resolve(decode_manifest(NORMAL.replace("{}", "{drafts: 1}"), "x.yaml"), plain, "x.yaml")
    assert str(caught.value) == "x.yaml: normal.drafts = 1 needs a drafter, which m lacks; write 0"


def test_all_broken_rules_are_told_at_once():
    with pytest.raises(ManifestError) as caught:
        decode_manifest(PD.replace("groups: 1", "groups: 0") + "device: cuda\n", "x.yaml")
    assert len(caught.value.problems) == 3


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ManifestError, match="cannot be read: No such file or directory; check it"):
        read_manifest(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"kind: \xff")
    with pytest.raises(ManifestError, match="is not UTF-8 text; save it as UTF-8"):
        read_manifest(tmp_path / "latin.yaml")
