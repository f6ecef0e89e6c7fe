"""The bench of determinism: its three arms, and that an answer of `full` which drafts changed fails it."""

import json

import pytest
from shoal.engines.toy import determinism_bench
from shoal.engines.toy.determinism_bench import main

ASKED = ["--questions", "2", "--temperatures", "1.0", "--json"]


def test_full_answers_as_without_drafts_and_by_ratio_not(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(determinism_bench, "OUTPUTS", 24)
    assert main(ASKED) == 0
    plain, by_ratio, full = json.loads(capsys.readouterr().out)["figures"]
    assert (plain["length"], plain["unchanged"]) == (1.0, 2)
    assert (full["determinism"], full["unchanged"]) == ("full", 2)
    assert by_ratio["unchanged"] < 2
    assert full["length"] > 1.0, "nothing was accepted"


def test_a_changed_answer_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    answers = iter([[[1], [2]], [[1], [3]], [[4], [2]]])
    monkeypatch.setattr(determinism_bench, "measure", lambda *_: (1.0, 1.0, next(answers)))
    assert main(ASKED) == 1
    assert "drafts changed 1 answers of full" in capsys.readouterr().err


def test_a_checkpoint_that_is_none_is_a_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
