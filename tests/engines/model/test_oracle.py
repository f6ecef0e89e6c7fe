"""The whole model against an independent implementation's arrays, through the check that fixtures are run with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from shoal.engines.model.check.__main__ import check, main

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
PART = ("short.input_ids", "short.token_types", "short.logits_n0", "short.router_topk", "short.streams")


def test_every_array_of_the_fixture_agrees() -> None:
    findings = check(ORACLE)
    assert [f.line() for f in findings if not f.passed] == []
    assert not [f.line() for f in findings if "not understood" in f.detail]
    names = {f.name for f in findings}
    assert {"reference.npz long.logits_n0", "reference.npz draft0.confidence_raw", "vision.npz image0.vit"} <= names
    assert "quant_vectors.npz index.block64" in names


@pytest.fixture
def small_fixture(tmp_path: Path) -> Path:
    """The checkpoint with a few arrays of one prompt."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(ORACLE / name, tmp_path / name)
    (tmp_path / "model.safetensors").symlink_to(ORACLE / "model.safetensors")
    with np.load(ORACLE / "reference.npz") as arrays:
        np.savez(tmp_path / "reference.npz", **{name: arrays[name] for name in PART})
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("routed_scaling_factor", 1.0),
        ("rms_norm_eps", 1e-6),
        ("hc_sinkhorn_iters", 19),
        ("sliding_window", 17),
        ("index_topk", 9),
        ("swiglu_limit", 1e6),
        ("compress_rope_theta", 10000),
    ],
)
def test_a_wrong_number_in_the_configuration_is_noticed(small_fixture: Path, key: str, value: float) -> None:
    config = json.loads((small_fixture / "config.json").read_text())
    config["text_config"][key] = value
    (small_fixture / "config.json").write_text(json.dumps(config))
    failed = [f.name for f in check(small_fixture) if not f.passed]
    assert "reference.npz short.logits_n0" in failed


def test_arrays_that_nothing_compares_are_listed(small_fixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(small_fixture)]) == 0
    with np.load(small_fixture / "reference.npz") as arrays:
        more = dict(arrays) | {"short.index_scores.3": np.zeros((24, 12)), "weather": np.zeros(3)}
    np.savez(small_fixture / "reference.npz", **more)
    capsys.readouterr()
    assert main([str(small_fixture), "--json"]) == 1
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert not found["reference.npz short.index_scores.3"]["passed"]
    assert found["reference.npz weather"]["detail"] == "not understood"


def test_a_missing_fixture_is_an_error_not_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
