"""The whole model against an independent implementation's arrays, through the check that fixtures are run with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from shoal.engines.model.check.__main__ import check, main
from shoal.engines.model.check.report import Reference

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
ODD = ORACLE.with_name("oracle-odd")
PART = ("short.input_ids", "short.token_types", "short.logits_n0", "short.router_topk", "short.streams")


def test_every_array_of_the_fixture_agrees() -> None:
    findings = check(ORACLE)
    assert [f.line() for f in findings if not f.passed] == []
    assert not [f.line() for f in findings if "not understood" in f.detail]
    names = {f.name for f in findings}
    assert {"reference.npz long.logits_n0", "reference.npz draft0.confidence_raw", "vision.npz image0.vit"} <= names
    assert "quant_vectors.npz index.block64" in names


def test_every_array_of_a_fixture_of_other_sizes_agrees() -> None:
    findings = check(ODD)
    assert [f.line() for f in findings if not f.passed] == []
    names = {f.name for f in findings}
    assert {"reference.npz long.logits_n0", "reference.npz image.engram_rows", "vision.npz image1.aligner"} <= names
    assert {"reference.npz draft2.tokens", "reference.npz short.n1_ffn_out"} <= names


@pytest.fixture
def odd_fixture(tmp_path: Path) -> Path:
    """A copy of the small second fixture."""
    return Path(shutil.copytree(ODD, tmp_path / "odd"))


@pytest.mark.parametrize(
    ("tensor", "noticed"),
    [
        ("mtp.1.norm.weight", "reference.npz draft0.normed"),
        ("layers.5.ffn_norm.weight", "reference.npz short.logits_n0"),
        ("vision.blocks.0.attn.wo.bias", "vision.npz image0.vit"),
    ],
)
def test_one_wrong_weight_is_noticed_where_it_acts(
    odd_fixture: Path, capsys: pytest.CaptureFixture[str], tensor: str, noticed: str
) -> None:
    tensors = load_file(odd_fixture / "model.safetensors")
    tensors[tensor].flatten()[:1] += 1
    save_file(tensors, odd_fixture / "model.safetensors", metadata={"format": "pt"})
    assert main([str(odd_fixture)]) == 1
    failed = {line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")}
    assert f"FAIL {noticed}" in failed
    assert ("FAIL reference.npz short.logits_n0" in failed) == (tensor.startswith("layers."))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "neither model.safetensors.index.json nor model.safetensors"),
        ("tokenizer.json", "tokenizer.json: is missing"),
        ("reference.npz", "reference.npz: is missing"),
    ],
)
def test_a_missing_file_is_named(odd_fixture: Path, capsys: pytest.CaptureFixture[str], file: str, said: str) -> None:
    (odd_fixture / file).unlink()
    assert main([str(odd_fixture)]) == 2
    assert said in capsys.readouterr().err


Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("image.token_types"), "lacks image.token_types"),
        (lambda a: a.pop("image.image0.patches"), "17 image positions, its 0 pictures fill 0"),
        (lambda a: a["short.input_ids"].fill(320), "ids in [0, 320)"),
        (lambda a: a.update({"draft0.prompt": np.array("none")}), "draft0 follows position 24 of prompt 'none'"),
        (lambda a: a.update({"draft0.position": np.array(36)}), "draft0 follows position 36"),
        (lambda a: a.clear(), "holds no array that this check compares"),
    ],
)
def test_arrays_that_contradict_each_other_are_an_error(
    odd_fixture: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Arrays], object], said: str
) -> None:
    with np.load(odd_fixture / "reference.npz") as arrays:
        changed = dict(arrays)
    change(changed)
    np.savez(odd_fixture / "reference.npz", **changed)
    assert main([str(odd_fixture)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("file", ["reference.npz", "vision.npz", "engram_map.npy"])
def test_a_file_that_holds_no_arrays_is_an_error(
    odd_fixture: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    (odd_fixture / file).write_bytes((odd_fixture / file).read_bytes()[:100])
    assert main([str(odd_fixture)]) == 2
    assert f"{file}: cannot be read" in capsys.readouterr().err


def test_a_constant_reference_is_compared_by_its_size() -> None:
    reference = Reference("some.npz", {"one": np.array([300.0])})
    reference.near("one", torch.tensor([300.01]))
    reference.near("one", torch.tensor([300.1]))
    assert [finding.passed for finding in reference.findings] == [True, False]


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
