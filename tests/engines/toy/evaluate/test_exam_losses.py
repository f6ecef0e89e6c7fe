"""A loss zeroes the bytes of its kind and no others, and a reader of the answers sees it."""

import dataclasses
import re

import pytest
import torch
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.run.load import build_engine
from shoal.engines.toy.evaluate.losses import Loss, forget, without_engram
from shoal.engines.toy.evaluate.room import Room
from shoal.engines.toy.evaluate.sitting import config_for, sit
from shoal.engines.toy.tasks import lexicon, pictures, recall
from shoal.engines.toy.tasks.mixture import examination_random
from shoal.engines.toy.tasks.sample import Sample

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


def recall_behind_the_first_choice() -> Sample:
    """A code that lies where a blind choice of entries does not look (it takes the first 128 of each kind, up to token
    255), and that the kept rows at the end of the prompt do not see either."""
    drawn = (recall.generate(examination_random(1, i), tokens=512, needles=3, turns=1) for i in range(100))
    return next(sample for sample in drawn if 0.55 < place_of_code(sample) < 0.65)


def place_of_code(sample: Sample) -> float:
    text, (code,) = sample.messages[0]["content"], re.findall(r"\d+", sample.wanted.text)
    return text.index(code) / len(text)


def test_every_loss_of_what_is_cached_changes_answers(room: Room):
    """A code in a long text and some words of the lexicon: whole answers, for the model is trained to begin alike."""
    samples = [recall_behind_the_first_choice(), *(lexicon.generate(examination_random(1, i), 4) for i in range(3))]
    model, questions = dataclasses.replace(room.model, drafter=None), room.questions(samples)
    intact = sit(model, questions)
    for loss in (Loss.MAIN, Loss.INDEX, Loss.WINDOW, Loss.ENGRAM):
        assert sit(model, questions, loss) != intact, loss


def test_a_lost_picture_changes_the_answer(room: Room):
    """The pictures are described: what cannot be seen cannot all be guessed."""
    drawn = (pictures.generate(examination_random(1, i), images=1, turns=1) for i in range(30))
    questions = room.questions([sample for sample in drawn if "picture shows" in sample.wanted.text][:2])
    model = dataclasses.replace(room.model, drafter=None)
    assert len(questions) == 2
    assert sit(model, questions, Loss.IMAGES) != sit(model, questions)


def test_without_engram_shares_the_other_weights(room: Room):
    bare = without_engram(room.model)
    assert all(layer.engram is None for layer in bare.trunk.layers)
    assert any(layer.engram is not None for layer in room.model.trunk.layers)
    assert bare.trunk.embed is room.model.trunk.embed


def test_questions_that_share_an_engine_are_answered_as_alone(room: Room):
    model, questions = dataclasses.replace(room.model, drafter=None), [text(3, 30, 4), text(4, 60, 4)]
    assert sit(model, questions) == sit(model, questions[:1]) + sit(model, questions[1:])
