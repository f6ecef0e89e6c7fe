"""Replays of the cut traces give what a naive cache gives, in the golden file's own schema; bad lines are named."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from naive_cache import Stream, lru, lru_sequential, ttl
from shoal.cluster.cli import app
from shoal.kvstore.errors import TraceError
from shoal.kvstore.trace.formats import load_trace
from shoal.kvstore.trace.golden import check_trace
from typer.testing import CliRunner

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
WEKA = "weka_claude_code_sessions.jsonl.gz"


def raw_lines(name: str) -> list[bytes]:
    return gzip.decompress((TRACES / name).read_bytes()).splitlines()


def mooncake_stream(name: str) -> tuple[Stream, list[int]]:
    lines = [json.loads(line) for line in raw_lines(name)]
    return [(r["timestamp"] * 1000, r["hash_ids"]) for r in lines], [r["input_length"] for r in lines]


def weka_stream(name: str) -> tuple[Stream, list[int]]:
    """Written from the golden file's `parse` text: a start each 300 s, sub-agents in place, every second id."""
    found = []
    for k, raw in enumerate(raw_lines(name)):
        p = 0
        for r in json.loads(raw)["requests"]:
            calls = [(x, r["t"]) for x in r["requests"]] if r["type"] == "subagent" else [(r, 0.0)]
            for q, t0 in calls:
                ids = [i for first, count in q["hash_runs"] for i in range(first, first + count)][1::2]
                found.append((round((k * 300 + t0 + q["t"]) * 1e6), k, p, [k * 10**9 + i for i in ids], q["in"]))
                p += 1
    found.sort(key=lambda r: r[:3])
    return [(at, ids) for at, _, _, ids, _ in found], [tokens for *_, tokens in found]


def naive_entry(name: str, block: int) -> dict:
    """An entry as the golden file has it, from the naive caches."""
    stream, tokens = weka_stream(name) if name == WEKA else mooncake_stream(name)
    blocks = sum(len(ids) for _, ids in stream)

    def told(hits: list[int], **more: object) -> dict:
        hit_tokens = sum(min(h * block, n) for h, n in zip(hits, tokens, strict=True))
        rates = {"block_hit_rate": sum(hits) / blocks, "token_hit_rate": hit_tokens / sum(tokens)}
        return {"hit_blocks": sum(hits), "requests_with_hit": sum(h > 0 for h in hits)} | rates | more

    def variants(capacity: int) -> dict:
        found = {f"lru_{o}_first": lru(stream, capacity, o == "tail") for o in ("head", "tail")}
        found["lru_sequential"] = lru_sequential(stream, capacity)
        return {key: told(hits, object_hits=resident) for key, (hits, resident) in found.items()}

    def lives(ttl_s: float) -> dict:
        found = {key: ttl(stream, int(ttl_s * 10**6), key == "ttl_sliding") for key in ("ttl_sliding", "ttl_fixed")}
        return {key: told(h, peak_live_blocks=p, mean_live_blocks=m) for key, (h, p, m) in found.items()}

    return {
        "input_file": name,
        "input_sha256": hashlib.sha256((TRACES / name).read_bytes()).hexdigest(),
        "block_size_tokens": block,
        "requests": len(stream),
        "block_refs": blocks,
        "unique_blocks": len({block for _, ids in stream for block in ids}),
        "infinite": told(lru(stream, 10**9, True)[0]),
        "lru": [{"capacity_blocks": c} | variants(c) for c in (25, 700, 4000)],
        "ttl": [{"ttl_s": t} | lives(t) for t in (3, 30, 600)],
    }


@pytest.mark.parametrize(
    ("name", "block"), [(CONVERSATION, 512), ("mooncake_synthetic_trace.jsonl.gz", 512), (WEKA, 128)]
)
def test_every_number_of_a_cut_trace_is_the_naive_caches(name: str, block: int) -> None:
    compared = list(check_trace("cut", naive_entry(name, block), TRACES))
    assert len(compared) > 50
    assert [one for one in compared if not one.is_match] == []


def test_check_prints_what_differs_and_what_nobody_computes(tmp_path: Path) -> None:
    entry = {"input_file": CONVERSATION, "block_size_tokens": 512, "requests": 601, "colour": 3}
    (tmp_path / "golden.json").write_text(json.dumps({"traces": {"cut": entry}}))
    told = CliRunner().invoke(app, ["experiment", "--check", str(tmp_path / "golden.json"), "--traces", str(TRACES)])
    assert told.exit_code == 1
    assert told.output.splitlines() == [
        "cut: 0 of 2 numbers match",
        "  differs: cut.requests is 200, golden 601",
        "  differs: cut.colour is None, golden 3",
    ]


def test_converted_trace_has_the_same_hits(tmp_path: Path) -> None:
    out = tmp_path / "day.jsonl.gz"
    told = CliRunner().invoke(app, ["trace", "convert", str(TRACES / WEKA), "--out", str(out)])
    assert told.exit_code == 0, told.output
    before, after = load_trace(TRACES / WEKA), load_trace(out, 128)
    assert before.times_us.tolist() == after.times_us.tolist()
    assert before.starts.tolist() == after.starts.tolist()
    assert before.grains_max == after.grains_max


def test_describe_counts_requests_of_every_format() -> None:
    for name, requests in ((CONVERSATION, 200), ("azure_llm_2023_conv.csv.gz", 300)):
        told = CliRunner().invoke(app, ["trace", "describe", str(TRACES / name), "--json"])
        assert json.loads(told.output)["requests"] == requests
    told = CliRunner().invoke(app, ["trace", "describe", str(TRACES / "servegen_arrival_rates.csv.gz"), "--json"])
    assert json.loads(told.output) == {"format": "servegen", "workloads": ["language/m-large"], "days": 3.0}


GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
SESSION = '{"id": "a", "block_size": 64, "requests": [{"t": 0, "in": 130, "hash_runs": [[1, 2]]}]}\n'
RATES = "workload,window_start_s,requests_per_s,active_clients\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BAD = [
    ("", 1, "file must not be empty"),
    ("hello\n", 1, "the line must be a Mooncake or Weka JSON object"),
    (GOOD + '{"timestamp": 6}\n', 2, "input_length must be given"),
    (GOOD + GOOD.replace("5", '"x"'), 2, "timestamp must hold: expected `float`, got `str`"),
    (GOOD + GOOD.replace(": 5", ": 4"), 2, "timestamp = 4 must not be before 5"),
    (GOOD + GOOD.replace("[1, 2]", "[1]").replace("600", "1600"), 2, "hash_ids has 1 ids; 1600 tokens make 3 full"),
    (GOOD + GOOD.replace("[1, 2]", "[1, 1]"), 2, "hash_ids must not repeat an id"),
    (GOOD + GOOD.replace("[1, 2]", "[1, -2]"), 2, "hash_ids[1] must hold: expected `int` >= 0"),
    (GOOD + "{\n", 2, "the line must be one JSON object"),
    (SESSION + SESSION.replace("130", "200"), 2, "requests[0].hash_runs stand for 2 blocks; in = 200 tokens make 3"),
    (SESSION.replace("64", "96"), 1, "block_size = 96 must divide the grain of 128 tokens"),
    (AZURE + "2023-11-16 18:17:02,1,1\n", 3, "TIMESTAMP = 2023-11-16 18:17:02 must not be before the line above"),
    (AZURE + "yesterday,1,1\n", 3, "TIMESTAMP = 'yesterday' must be a date and time"),
    (AZURE + "2023-11-16 18:18:02,many,1\n", 3, "ContextTokens = 'many' must be a whole number of tokens"),
    (RATES + "a,0,1,1\n", 1, "file has rates, not requests"),
]


@pytest.mark.parametrize(("text", "line", "message"), BAD)
def test_a_bad_line_is_named_with_field_and_rule(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: {message}")


def test_a_cut_off_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes((TRACES / CONVERSATION).read_bytes()[:3000])
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(path)
