"""The recorded scenarios, one test an entry, and the replayer's own honesty."""

import json
from pathlib import Path

import pytest
import yaml
from shoal.engines.core.golden.__main__ import main
from shoal.engines.core.golden.lengths import replay_verify
from shoal.engines.core.golden.outcome import Outcome
from shoal.engines.core.golden.replay import replay_entry, replay_file

DATA = Path(__file__).resolve().parents[2] / "data" / "golden"
DOCUMENT = yaml.safe_load((DATA / "scheduler.yaml").read_text())
DEFAULTS = DOCUMENT["trace_defaults"]
LATER_KINDS = {"rng_positions"}


@pytest.mark.parametrize("entry", DOCUMENT["scenarios"], ids=lambda entry: entry["id"])
def test_recorded_scenario(entry):
    verdict = replay_entry(entry, DEFAULTS)
    assert verdict.outcome is not Outcome.FAILED, "\n".join(verdict.differences)
    if entry["kind"] not in LATER_KINDS:
        assert verdict.outcome is Outcome.PASSED, verdict.differences


def entry_of(entry_id):
    return next(entry for entry in DOCUMENT["scenarios"] if entry["id"] == entry_id)


def test_a_changed_expectation_is_a_failure_that_names_the_place():
    entry = entry_of("decode-01-order")
    changed = yaml.safe_load(yaml.safe_dump(entry))
    changed["ops"][5]["expect"]["tables"]["a"] = [1, 9]
    verdict = replay_entry(changed, DEFAULTS)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.differences == ("op 5.tables.a[1]: expected 9, got 4",)


@pytest.mark.parametrize("entry_id", ["vote-04-dead-request-runs-a-prefill", "prefill-17-prompt-engine-requeue-order"])
def test_a_defect_is_not_reproduced(entry_id):
    """The same entry without its mark is compared under the published rules, or fails where we always do better."""
    entry = {key: value for key, value in entry_of(entry_id).items() if key != "defect"}
    published = replay_entry(entry, DEFAULTS).outcome
    assert published is (Outcome.PASSED if entry_id.startswith("vote") else Outcome.FAILED)
    assert replay_entry(entry_of(entry_id), DEFAULTS).outcome is Outcome.PASSED


def test_an_unknown_defect_is_not_passed_silently():
    entry = entry_of("decode-06-empty") | {"defect": "something else is wanted", "id": "decode-99"}
    assert replay_entry(entry, DEFAULTS).outcome is Outcome.NOT_YET


VERIFY = json.loads((DATA / "varlen.json").read_text())
VERIFY_ENTRIES = [(section, entry) for section in ("host", "estimators", "device") for entry in VERIFY[section]]


@pytest.mark.parametrize(
    ("section", "entry"), VERIFY_ENTRIES, ids=lambda one: one["id"] if isinstance(one, dict) else one
)
def test_recorded_verify_length(section, entry):
    verdict = replay_verify(section, entry)
    assert verdict.outcome is Outcome.PASSED, "\n".join(verdict.differences)


def test_every_entry_about_verify_lengths_is_replayed():
    verdicts = list(replay_file(DATA / "varlen.json"))
    assert len(verdicts) == 56 + 3 + 15
    assert {verdict.outcome for verdict in verdicts} == {Outcome.PASSED}


@pytest.mark.parametrize(("section", "entry"), VERIFY_ENTRIES[:1] + VERIFY_ENTRIES[56:], ids=lambda one: str(one)[:20])
def test_a_changed_verify_length_is_a_failure(section, entry):
    """Each kind of expectation is compared: a recorded value that is off by one fails its entry."""
    changed = json.loads(json.dumps(entry))
    if section == "host":
        changed["expect"]["seqlens_q"][0] -= 1
    elif section == "device":
        changed["expect_q"][-1] += 1
    elif "trace" in changed:
        changed["trace"][-1][-1] += 1.0
    else:
        changed["expect"][-1] += 1.0
    assert replay_verify(section, changed).outcome is Outcome.FAILED


def test_the_command_counts_and_names(capsys, tmp_path):
    assert main([str(DATA / "scheduler.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("not yet: rng_positions rng-01-positions (") for line in lines)
    assert lines[-1].endswith(" not yet")
    broken = tmp_path / "broken.yaml"
    entry = entry_of("state-03-slots")
    entry = entry | {"rows": [{"max_num_seqs": 4, "ratio": 1.2, "slots": 6}]}
    broken.write_text(yaml.safe_dump({"format": 1, "trace_defaults": DEFAULTS, "scenarios": [entry]}))
    assert main([str(broken)]) == 1
    assert "row 0.slots: expected 6, got 5" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_read(capsys, tmp_path):
    assert main([]) == 2
    other = tmp_path / "other.yaml"
    other.write_text("format: 7\n")
    assert main([str(other)]) == 2
    assert "expected a map with format: 1" in capsys.readouterr().err


def test_a_step_that_should_fail_and_does_not_is_a_failure():
    entry = entry_of("decode-06-empty") | {"ops": [{"step": {}, "expect_error": "anything"}]}
    verdict = replay_entry(entry, DEFAULTS)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.differences == ("op 0: expected an error, got a decode step",)
