"""The bench of one engine: its questions, and that answers with drafts are compared with those without."""

import json

import pytest
from shoal.engines.toy import engine_bench
from shoal.engines.toy.engine_bench import Figure, lines_of, main, questions


def test_questions_are_prompts_without_their_answers():
    prompts = questions(6, seed=1)
    assert prompts == questions(6, seed=1)
    assert prompts != questions(6, seed=2)
    assert all(5 < len(prompt) < 1000 for prompt in prompts)


def test_measures_both_and_says_the_ratio(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_bench, "OUTPUTS_MAX", 12)
    assert main(["--questions", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(f["drafts"], f["verify"]) for f in figures] == [(0, "full"), (5, "full"), (5, "varlen")]
    plain, drafted, chosen = figures
    assert plain["tokens"] == plain["steps"], "one token a step"
    assert plain["length"] == 1.0
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["steps"] < plain["steps"], "nothing was accepted"
    assert chosen["tokens"] == plain["tokens"]
    assert 0 < chosen["verified"] < chosen["made"], "the drafts of a last step are never verified"
    figures = [Figure(0, "full", 1, 10, 10, 1.0, 1.0, 1.0), Figure(5, "full", 1, 10, 4, 0.5, 0.5, 2.5, 20, 15)]
    assert "2.00 x       75%" in lines_of(figures)[2]


def test_a_checkpoint_that_is_none_is_a_line(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
