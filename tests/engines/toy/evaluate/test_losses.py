"""A loss zeroes the bytes of its kind and no others, and a reader of the answers sees it."""

import dataclasses

import pytest
import torch
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.run.load import build_engine
from shoal.engines.toy.evaluate.losses import Loss, forget, without_engram
from shoal.engines.toy.evaluate.papers import paper
from shoal.engines.toy.evaluate.room import Room
from shoal.engines.toy.evaluate.sitting import config_for, sit
from shoal.engines.toy.tasks.mixture import examination_random

from tests.engines.toy.evaluate.random_text import text

KINDS = ("index", "main", "rings", "accumulators")


@pytest.mark.parametrize(("loss", "gone"), [(Loss.MAIN, "main"), (Loss.INDEX, "index"), (Loss.WINDOW, "rings")])
def test_only_the_bytes_of_the_kind_are_gone(room: Room, loss: Loss, gone: str):
    question = text(1, 150, 8)
    engine, memory = build_engine(dataclasses.replace(room.model, drafter=None), config_for([question]))
    engine.submit(EngineRequest("a", question.prompt, 150, SamplingParams(temperature=0.0, max_tokens=8)), now_us=0)
    engine.step(now_us=0)

    def bytes_of() -> dict[str, torch.Tensor]:
        sections = memory.block_layout.sections
        parts = {
            kind: torch.cat([memory.blocks[:, s.offset : s.offset + s.bytes] for s in sections if s.kind == kind], 1)
            for kind in ("index", "main")
        }
        rings, accumulators = memory.slot_layout.rings, memory.slot_layout.accumulators
        parts["rings"] = torch.cat([memory.slots[:, r.offset : r.offset + r.bytes] for r in rings], 1)
        parts["accumulators"] = torch.cat([memory.slots[:, a.offset : a.offset + a.bytes] for a in accumulators], 1)
        return parts

    before = bytes_of()
    assert all(bool(before[kind].any()) for kind in KINDS)
    forget(memory, loss)
    after = bytes_of()
    assert not bool(after[gone].any())
    assert all(torch.equal(before[kind], after[kind]) for kind in KINDS if kind != gone)


def test_every_loss_of_what_is_cached_changes_answers_of_a_long_prompt(room: Room):
    model, questions = dataclasses.replace(room.model, drafter=None), [text(2, 240, 4)]
    intact = sit(model, questions)
    for loss in (Loss.MAIN, Loss.INDEX, Loss.WINDOW, Loss.ENGRAM):
        assert sit(model, questions, loss) != intact, loss


def test_a_lost_picture_changes_the_answer(room: Room):
    pictured = room.questions([paper("pictures").generate(examination_random(1, 0))])[0]
    questions = [dataclasses.replace(pictured, outputs_max=4)]
    model = dataclasses.replace(room.model, drafter=None)
    assert sit(model, questions, Loss.IMAGES) != sit(model, questions)


def test_without_engram_shares_the_other_weights(room: Room):
    bare = without_engram(room.model)
    assert all(layer.engram is None for layer in bare.trunk.layers)
    assert any(layer.engram is not None for layer in room.model.trunk.layers)
    assert bare.trunk.embed is room.model.trunk.embed


def test_questions_that_share_an_engine_are_answered_as_alone(room: Room):
    model, questions = dataclasses.replace(room.model, drafter=None), [text(3, 30, 4), text(4, 60, 4)]
    assert sit(model, questions) == sit(model, questions[:1]) + sit(model, questions[1:])
