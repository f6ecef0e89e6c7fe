"""An experiment's manifest is decoded strictly; a small one writes Parquet, a picture and a page."""

from pathlib import Path

import pytest
from shoal.cluster.cli import app
from shoal.cluster.errors import ManifestError
from shoal.cluster.experiment.manifest import decode_experiment, read_experiment
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = """kind: Experiment
name: small
traces: [{name: talk, file: mooncake_conversation_trace.jsonl.gz, traffic: chat, block: 512}]
ttl: [10s]
capacity: [500]
policies: [lru]
"""
BAD = [
    (GOOD.replace("Experiment", "Cluster"), "kind = Cluster must be Experiment; this command reads experiments"),
    (GOOD + "tttl: 1\n", "tttl = 1 is not a known key; did you mean ttl?"),
    (GOOD.replace("[lru]", "[mru]"), "policies[0] = mru must be one of"),
    (GOOD.replace("[500]", "[5]"), "capacity[0] = 5 must be at least 20 grains; write for example 10000"),
    (GOOD.replace("file: moon", "file: ../moon"), "traces[0].file = ../mooncake_conversation_trace.jsonl.gz must be"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_broken_rule_is_named(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_experiment(text, "x.yaml")
    assert f"x.yaml: {message}" in str(caught.value)


def test_the_shipped_experiment_can_be_read() -> None:
    assert read_experiment(ROOT / "manifests" / "experiments" / "ttl-hit-rate.yaml").name == "ttl-hit-rate"


def test_a_small_experiment_writes_its_results(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("matplotlib")
    (tmp_path / "small.yaml").write_text(GOOD)
    traces = str(ROOT / "tests" / "data" / "traces")
    asked = ["experiment", str(tmp_path / "small.yaml"), "--traces", traces, "--out", str(tmp_path), "--jobs", "1"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    rows = parquet.read_table(tmp_path / "small.parquet").to_pylist()
    assert [row["policy"] for row in rows] == ["unlimited", "ttl_sliding", "ttl_fixed", "lru"]
    assert rows[0]["hit_blocks"] >= max(row["hit_blocks"] for row in rows)
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in (tmp_path / "small.html").read_text()
