"""The command: tables, JSON, and one line for a mistake."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from shoal.engines.model.errors import CheckpointError
from shoal.engines.toy.evaluate.__main__ import main
from shoal.engines.toy.evaluate.acceptance import Step
from shoal.engines.toy.evaluate.drafting import Answered
from shoal.engines.toy.evaluate.jobs import Attempt, Job, Outcome, Settings, jobs, run
from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.evaluate.papers import DRAFTS, PAPERS, names
from shoal.engines.toy.evaluate.report import Report
from shoal.engines.toy.evaluate.room import Room
from shoal.engines.toy.evaluate.summary import summary_of

ONE_PROCESS = ["--samples", "1", "--workers", "1"]


def test_tables_show_answers_losses_drafts_and_goals(tmp_path: Path):
    """Three of four answers right, none without pictures, and drafts that are right twice out of three times."""
    right, wrong = Attempt(0, True, True, (5, 1)), Attempt(0, False, False, (6, 1))
    intact = tuple(replace(right if i else wrong, index=i) for i in range(4))
    lost = tuple(replace(wrong, index=i) for i in range(2))
    answered = Answered((5, 7, 8, 1), (Step(2, 3, False, (0.9, 0.9, 0.2, 0.2, 0.2)),))
    work = (
        Outcome(Job("pictures", (0, 1, 2, 3)), intact),
        Outcome(Job("pictures", (0, 1), Loss.IMAGES), lost),
        Outcome(Job("pictures", (0,), is_drafting=True), greedy=(answered,), sampled=(answered,)),
    )
    out = io.StringIO()
    Report(Settings(tmp_path, seed=3), summary_of(work, 5), 61.2).write(out)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "pictures 4 75.0 % 30 – 95 % ≥ 95 % missed 75.0 %" in lines
    assert "images pictures 2 50.0 % 0.0 % 50.0 points ≥ 30 % met 50.0 %" in lines
    assert "accepted length, with the bonus token 3.00 3.00" in lines
    assert "draft 2 accepted, if judged 100.0 % of 1 100.0 % of 1" in lines
    assert "draft 4 accepted, if judged none none" in lines
    assert "answers equal to those without drafts 0.0 % of 1 none" in lines
    assert "0.9 – 1.0 2 90.0 % 100.0 %" in lines
    assert lines[-1] == "1 of 6 goals met, in 61 s"


def test_json_is_one_document_and_the_bar_is_for_terminals(
    toy_dir: Path, room: Room, capsys: pytest.CaptureFixture[str]
):
    arguments = [
        "--model",
        str(toy_dir),
        "--only",
        "copying",
        DRAFTS,
        "--no-ablations",
        "--json",
        "--seed",
        "41",
        *ONE_PROCESS,
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert shown.err == ""
    assert (found["seed"], found["samples"], found["mode"]) == (41, 1, "n1")
    paper = found["papers"][0]
    (sample,) = room.samples("copying", 41, (0,))
    is_right, _ = room.judge(sample, room.answer([sample], None)[0])
    assert (paper["paper"], paper["samples"], paper["accuracy"]["value"]) == ("copying", 1, float(is_right))
    greedy, sampled = found["drafts"]
    assert (greedy["choice"], sampled["choice"]) == ("greedy", "temperature 1")
    assert greedy["answers_equal_without_drafts"] == {"answers": 1, "value": 1.0}
    assert len(greedy["acceptance_by_position"]) == 5
    assert sum(b["drafts"] for b in sampled["reliability"]) == sum(sampled["judged_by_position"])
    goals = {goal["figure"]: goal for goal in found["goals"]}
    error = sampled["calibration_error"]
    assert goals["calibration error, temperature 1"] == {
        "figure": "calibration error, temperature 1",
        "at_most": 0.05,
        "found": error,
        "is_met": error <= 0.05,
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "cooking"], "--only cooking: no such task; name any of recall, copying"),
        (["--samples", "0"], "--samples 0: must be at least 1; 100 is the default"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--model", "nowhere"], "--model nowhere: must hold config.json; give a checkpoint directory"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"evaluate: {told}")
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_a_broken_checkpoint_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text("{}")
    assert main(["--model", str(tmp_path), *ONE_PROCESS]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("evaluate: config.json: ")
    assert shown.err.count("\n") == 1


def test_a_broken_checkpoint_is_told_by_other_processes_as_well(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        list(run(Settings(tmp_path, workers=2), [Job("chat", (0,))]))


def test_the_work_covers_every_question_once(tmp_path: Path):
    work = jobs(Settings(tmp_path, samples=100))
    for paper in PAPERS:
        asked = sorted(i for j in work if j.paper == paper.name and not j.loss and not j.is_drafting for i in j.indices)
        assert asked == list(range(paper.count(100)))
        for loss in paper.losses:
            again = sorted(i for j in work if j.paper == paper.name and j.loss is loss for i in j.indices)
            assert again == list(range(paper.count(100) // 2))
        assert any(j.is_drafting for j in work if j.paper == paper.name) == paper.is_mixed
        assert all(len(j.indices) <= paper.batch for j in work if j.paper == paper.name)


def test_only_narrows_the_work(tmp_path: Path):
    def of(*only: str, losses: bool = True) -> set[tuple[str, bool, bool]]:
        work = jobs(Settings(tmp_path, only=only, with_losses=losses))
        return {(job.paper, job.loss is not None, job.is_drafting) for job in work}

    assert of("copying") == {("copying", False, False), ("copying", True, False)}
    assert of("copying", losses=False) == {("copying", False, False)}
    assert of("chat", DRAFTS) == {("chat", False, False), ("chat", False, True)}
    assert of("recall-2048-second") == {("recall-2048-second", False, False)}
    mixed = {paper.name for paper in PAPERS if paper.is_mixed}
    assert of(DRAFTS) == {(name, False, True) for name in mixed}
    assert {"recall", "recall-4000-first", "pictures", DRAFTS} <= set(names())
