"""`builtin:toy` is the checkpoint that was shipped and no other; making one the shipped one checks it first."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.decoder import Model
from shoal.engines.model.errors import CheckpointError, WeightsError
from shoal.engines.model.save import save_checkpoint
from shoal.engines.model.weights import load_model_weights
from shoal.engines.toy import __main__ as copying
from shoal.engines.toy import ship
from shoal.engines.toy.build import SUMS, checkpoint_files, ensure_toy, read_sums, verified
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tokenizer import TOKENIZER_FILE, toy_tokenizer


def test_the_shipped_toy_is_a_small_checkpoint_of_the_toys_configuration() -> None:
    directory = ensure_toy()
    config = ModelConfig.from_dir(directory)
    assert config == toy_config(toy_tokenizer())
    assert sum(path.stat().st_size for path in checkpoint_files(directory)) <= ship.BYTES_MAX
    load_model_weights(directory, config)
    model = Model.load(directory)
    ids, none = torch.arange(3, 60), torch.zeros(57, dtype=torch.bool)
    assert model.logits(model.forward_full(ids, none, torch.zeros(0, config.hidden)).hidden).isfinite().all()


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A directory of three files with their sums."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(name.encode() * 9)
    sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in checkpoint_files(tmp_path))
    (tmp_path / SUMS).write_text("".join(sums))
    return tmp_path


def test_files_that_have_their_sums_are_taken(listed: Path) -> None:
    assert verified(listed) == listed


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_not_the_shipped_one_is_named_with_a_remedy(listed: Path, name: str) -> None:
    path = listed / name
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(WeightsError, match=f"{name}: differs from its sum in SHA256SUMS; check out or install"):
        verified(listed)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 28000000\n")
    with pytest.raises(WeightsError, match=f"{name}: is a Git LFS pointer, not the file itself; run `git lfs pull`"):
        verified(listed)
    path.unlink()
    with pytest.raises(WeightsError, match=f"{name}: cannot be read .No such file or directory.; check out or install"):
        verified(listed)


def test_a_file_beside_the_shipped_ones_is_named(listed: Path) -> None:
    (listed / "model-00001-of-00002.safetensors").write_bytes(b"old")
    with pytest.raises(WeightsError, match=r"model-00001-of-00002.safetensors.* not listed in SHA256SUMS; remove"):
        verified(listed)


@pytest.mark.parametrize("text", [None, "one word a line\n", "\n"])
def test_without_sums_nothing_is_taken(listed: Path, text: str | None) -> None:
    (listed / SUMS).unlink()
    if text is not None:
        (listed / SUMS).write_text(text)
    with pytest.raises(WeightsError, match="SHA256SUMS: cannot be read"):
        verified(listed)


def test_shipping_replaces_what_was_there(random_toy: Path, listed: Path) -> None:
    (listed / "model-00001-of-00002.safetensors").write_bytes(b"old")
    assert ship.ship(random_toy, listed) == listed
    assert [p.name for p in checkpoint_files(listed)] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert set(read_sums(listed / SUMS)) == {p.name for p in checkpoint_files(listed)}
    for path in checkpoint_files(random_toy):
        assert (listed / path.name).read_bytes() == path.read_bytes()


def test_a_checkpoint_in_parts_is_shipped_in_parts(random_toy: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(random_toy)
    (parts := tmp_path / "parts").mkdir()
    (target := tmp_path / "target").mkdir()
    save_checkpoint(parts, config, dict(load_model_weights(random_toy, config)), shard_bytes=15 << 20)
    shutil.copy(TOKENIZER_FILE, parts)
    names = {p.name for p in checkpoint_files(ship.ship(parts, target))}
    assert len(names) > 4
    assert "model.safetensors.index.json" in names
    load_model_weights(target, config)


def test_what_cannot_be_shipped_changes_nothing(
    random_toy: Path, listed: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in listed.iterdir()}
    config = ModelConfig.from_dir(random_toy)

    def refused(match: str, name: str, data: bytes) -> None:
        copy = Path(shutil.copytree(random_toy, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True))
        (copy / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            ship.ship(copy, listed)

    other = dataclasses.replace(config, text=dataclasses.replace(config.text, index_topk=64))
    (folder := tmp_path_factory.mktemp("other") / "config.json").write_text("{}")
    save_checkpoint(folder.parent, other, dict(load_model_weights(random_toy, config)))
    refused("is not the toy's configuration", "config.json", folder.read_bytes())
    refused("is not the toy's tokenizer", "tokenizer.json", TOKENIZER_FILE.read_bytes() + b"\n")
    refused("header describes", "model.safetensors", (random_toy / "model.safetensors").read_bytes()[:-9])
    monkeypatch.setattr(ship, "BYTES_MAX", 1_000_000)
    refused("at most 1000000 can be shipped", "tokenizer.json", TOKENIZER_FILE.read_bytes())
    assert {p.name: p.read_bytes() for p in listed.iterdir()} == before


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert copying.main([str(tmp_path / "copy")]) == 0
    assert "copied" in capsys.readouterr().out
    for path in checkpoint_files(ensure_toy()):
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    assert copying.main([str(tmp_path / "random"), "--random"]) == 0
    assert "writing 1016 tensors" in capsys.readouterr().out
    assert copying.main([str(tmp_path / "random"), "--random"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert copying.main(["--random"]) == ship.main([]) == 2
    assert capsys.readouterr().err.count("usage:") == 2
    assert ship.main([str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
