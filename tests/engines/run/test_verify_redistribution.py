"""The device's split equals the core's, and gives the recorded rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.engines.core.verify.redistribution import redistribute as in_core
from shoal.engines.run.redistribution import redistribute

DATA = Path(__file__).resolve().parents[2] / "data" / "golden"
ENTRIES = json.loads((DATA / "varlen.json").read_text())["device"]
CHANCE = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_recorded_split(entry):
    confidences = torch.tensor(entry["prev_confidences"], dtype=torch.float32).reshape(-1, entry["nextn"])
    rows = redistribute(confidences, torch.tensor(entry["remap"]), entry["total_q"])
    assert rows.tolist() == entry["expect_q"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_it_equals_the_core(data):
    previous, drafts = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    row = st.lists(CHANCE, min_size=drafts, max_size=drafts)
    confidences = np.array(data.draw(st.lists(row, min_size=previous, max_size=previous)), np.float32)
    confidences = confidences.reshape(previous, drafts)
    remap = np.array(data.draw(st.lists(st.integers(-1, previous - 1), min_size=1, max_size=6)))
    total = data.draw(st.integers(len(remap), len(remap) * (1 + drafts)))
    wanted = in_core(confidences, remap, total)
    for asked in (total, torch.tensor(total)):
        assert redistribute(torch.from_numpy(confidences), torch.from_numpy(remap), asked).tolist() == wanted.tolist()


def test_an_engine_without_drafts_has_one_row_a_sequence():
    assert redistribute(torch.zeros((2, 0)), torch.tensor([0, -1, 1]), 3).tolist() == [1, 1, 1]
