"""What the command says and returns for a user's mistakes; none of these starts a cluster."""

import socket
from pathlib import Path

import pytest
from shoal.cluster.cli import app
from typer.testing import CliRunner, Result

MANIFEST = Path(__file__).resolve().parent.parent.parent / "manifests" / "normal.yaml"
FAILED, BAD_USAGE = 1, 2


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return CliRunner()


def told(result: Result, code: int) -> str:
    """The output of a command that ended with this code and without a traceback."""
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def edited(tmp_path: Path, old: str, new: str) -> str:
    text = MANIFEST.read_text()
    assert old in text
    path = tmp_path / "edited.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize("name", ["up", "down", "status", "chat", "generate", "validate", "plan", "demo"])
def test_help_shows_an_example(say: CliRunner, name: str) -> None:
    assert f"Example: shoal {name}" in told(say.invoke(app, [name, "--help"]), 0)


def test_a_manifest_that_is_not_there(say: CliRunner, tmp_path: Path) -> None:
    assert "none.yaml" in told(say.invoke(app, ["up", str(tmp_path / "none.yaml")]), BAD_USAGE)


def test_a_manifest_with_an_unknown_key(say: CliRunner, tmp_path: Path) -> None:
    path = edited(tmp_path, "groups: 1", "groups: 1\n  grops: 2")
    assert "normal.grops" in told(say.invoke(app, ["up", path]), BAD_USAGE)


def test_a_model_directory_that_is_not_there(say: CliRunner, tmp_path: Path) -> None:
    path = edited(tmp_path, "builtin:toy", "/no/such/model")
    assert "/no/such/model" in told(say.invoke(app, ["up", path]), BAD_USAGE)


def test_a_demo_without_a_store(say: CliRunner) -> None:
    assert "normal.yaml: store is missing" in told(say.invoke(app, ["demo", "--manifest", str(MANIFEST)]), BAD_USAGE)


def test_a_port_in_use(say: CliRunner, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        path = edited(tmp_path, "127.0.0.1:8000", f"127.0.0.1:{port}")
        message = told(say.invoke(app, ["up", path, "--detach"]), FAILED)
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in message


@pytest.mark.parametrize("words", [["down"], ["status"], ["chat", "hi"]])
def test_no_cluster(say: CliRunner, words: list[str]) -> None:
    assert "no cluster is up; `shoal up manifests/local.yaml`" in told(say.invoke(app, words), FAILED)


@pytest.mark.parametrize("words", [["down"], ["status"], ["chat", "hi"]])
def test_an_unknown_name(say: CliRunner, words: list[str]) -> None:
    assert "no cluster named 'nobody' is up" in told(say.invoke(app, [*words, "--name", "nobody"]), FAILED)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "127.0.0.1:1", "http://[bad"])
def test_an_endpoint_where_nothing_answers(say: CliRunner, endpoint: str) -> None:
    assert "does not answer" in told(say.invoke(app, ["chat", "hi", "--endpoint", endpoint]), FAILED)


@pytest.mark.parametrize("picture", ["/no/such.png", "/"])
def test_a_picture_that_is_not_there(say: CliRunner, picture: str) -> None:
    words = ["chat", "hi", "--endpoint", "http://127.0.0.1:1", "--image", picture]
    assert f"no such file: {picture}" in told(say.invoke(app, words), BAD_USAGE)


def test_a_schema_that_is_none(say: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{")
    words = ["chat", "hi", "--endpoint", "http://127.0.0.1:1", "--schema"]
    assert "give a file with a JSON schema" in told(say.invoke(app, [*words, "/no/such.json"]), BAD_USAGE)
    assert "give a file with a JSON schema" in told(say.invoke(app, [*words, str(tmp_path / "s.json")]), BAD_USAGE)


@pytest.mark.parametrize("words", [["down"], ["status"], ["up", str(MANIFEST)]])
def test_a_ray_that_is_not_there(say: CliRunner, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.live.session.CONNECT_DEADLINE_S", 0.5)
    message = told(say.invoke(app, [*words, "--address", "127.0.0.1:1"]), FAILED)
    assert "no Ray answers at 127.0.0.1:1; `ray start --head` starts one" in message
    assert "must be host:port" in told(say.invoke(app, [*words, "--address", "nonsense"]), FAILED)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shoal.engines.toy.build import write_random

    directory = tmp_path_factory.mktemp("drawn")
    write_random(directory)
    return directory


@pytest.fixture
def checkpoint(drawn: Path, tmp_path: Path) -> Path:
    """A random toy checkpoint to be broken."""
    import shutil

    return Path(shutil.copytree(drawn, tmp_path / "model"))


def test_generate_from_nowhere(say: CliRunner) -> None:
    assert "/no/such/model" in told(say.invoke(app, ["generate", "--model", "/no/such/model", "hi"]), BAD_USAGE)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "noise"])
def test_generate_from_a_broken_checkpoint(say: CliRunner, checkpoint: Path, name: str, damage: str) -> None:
    path = checkpoint / name
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "noise":
            path.write_bytes(b"\xff\x00noise" * 100)
    message = told(say.invoke(app, ["generate", "--model", str(checkpoint), "--max-tokens", "2", "hi"]), BAD_USAGE)
    assert message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "reference.npz"])
def test_check_of_a_broken_checkpoint(checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.engines.model.check.__main__ import main

    (checkpoint / name).write_bytes(b"noise")
    assert main([str(checkpoint)]) == BAD_USAGE
    assert capsys.readouterr().err
    assert main(["/no/such/model"]) == BAD_USAGE
