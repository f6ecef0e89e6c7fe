"""Packed rows: what they carry, whom they see, and that a pack depends on its number alone."""

from random import Random

import numpy as np
import pytest
import torch
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram import EngramHash, class_map
from shoal.engines.model.images import patches
from shoal.engines.model.vision import VisionEncoder
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tasks import chat, pictures
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.sample import Encoded
from shoal.engines.toy.tokenizer import toy_tokenizer
from shoal.engines.toy.training.course import COURSE
from shoal.engines.toy.training.examples import Examples
from shoal.engines.toy.training.images import image_rows
from shoal.engines.toy.training.initial import initial_weights
from shoal.engines.toy.training.packing import ALIGNMENT, collate, first_kept, pack, packing_order, span_starts
from shoal.engines.toy.training.rows import row_masks
from shoal.engines.toy.training.stacks import Stacks

KEEP = 140
PICTURES_MAX = 10


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return toy_config(toy_tokenizer())


@pytest.fixture(scope="module")
def hash_(config: ModelConfig) -> EngramHash:
    return EngramHash.build(config, class_map(toy_tokenizer()))


@pytest.fixture(scope="module")
def samples() -> list[tuple[int, Encoded]]:
    codec, dice = Codec.of(), Random(4)
    drawn = [pictures.generate(dice, images=2), *(chat.generate(dice) for _ in range(6))]
    return [(number % 3, encode(sample, codec)) for number, sample in enumerate(drawn)]


def test_documents_lie_whole_and_apart(
    samples: list[tuple[int, Encoded]], config: ModelConfig, hash_: EngramHash
) -> None:
    packed = pack(samples, (2, 256), PICTURES_MAX, config, hash_, KEEP)
    by_length = sorted(samples, key=lambda s: -len(s[1].ids))
    for number, (task, sample) in enumerate(by_length, start=1):
        rows, at = np.nonzero(packed.document == number)
        assert len(set(rows)) == 1
        assert at[0] % ALIGNMENT == 0
        own = (rows[0], slice(at[0], at[-1] + 1))
        assert np.array_equal(packed.ids[own], sample.ids)
        assert np.array_equal(packed.image_mask[own], sample.image_mask)
        told = packed.answer[own]
        assert np.array_equal(told[:-1] >= 0, sample.answer[1:])
        assert told[-1] == -1, "the last token predicts nothing"
        assert set(told[told >= 0]) <= {task}
        alone = hash_.rows(
            torch.from_numpy(sample.ids).long(),
            torch.from_numpy(sample.image_mask),
            [len(sample.ids)],
            torch.full((1, hash_.lookback), -1),
        )
        assert np.array_equal(packed.engram[own], alone.numpy())


def test_short_samples_are_not_left_out_for_being_short(samples: list[tuple[int, Encoded]]) -> None:
    lengths = [len(sample.ids) for _, sample in samples]
    room = sum(lengths[:4])
    first = packing_order(samples, room)
    assert sorted(len(s.ids) for _, s in first[:4]) == sorted(lengths[:4]), "those drawn first are placed first"
    assert [len(s.ids) for _, s in first[:4]] == sorted(lengths[:4], reverse=True)
    assert [s for _, s in first[4:]] == [s for _, s in samples[4:]], "the others fill gaps, as drawn"


def test_rows_see_their_own_document_only(
    samples: list[tuple[int, Encoded]], config: ModelConfig, hash_: EngramHash
) -> None:
    batch = collate([pack(samples, (2, 256), PICTURES_MAX, config, hash_, KEEP)], PICTURES_MAX, config)
    masks = row_masks(batch.rows, config)
    document, window = batch.rows.document, config.window
    for row, at in ((0, 5), (0, 130), (1, 40), (1, 200)):
        first = at // window * window - window  # position of the first key of the row's two blocks
        seen = masks.window[row, at].nonzero().flatten() + first
        wanted = [k for k in range(max(0, at - window + 1), at + 1) if document[row, k] == document[row, at]]
        assert seen.tolist() == wanted
        for ratio, mask in masks.entries.items():
            entries = mask[row, at].nonzero().flatten().tolist()
            same = [j for j in range((at + 1) // ratio) if document[row, j * ratio] == document[row, at]]
            assert entries == same


def test_decoder_windows_start_where_a_truncated_prompt_does() -> None:
    answer = np.zeros(600, np.bool_)
    answer[300:320] = answer[590:600] = True
    lower = first_kept(answer, keep=140)
    assert set(lower[:160]) == {0}
    assert set(lower[160:450]) == {160}
    assert set(lower[450:]) == {450}


def test_pictures_become_the_rows_of_the_served_tower(
    samples: list[tuple[int, Encoded]], config: ModelConfig, hash_: EngramHash
) -> None:
    weights = initial_weights(config, seed=3)
    stacks = Stacks(config, weights, torch.device("cpu"))
    batch = collate([pack(samples, (2, 256), PICTURES_MAX, config, hash_, KEEP)], PICTURES_MAX, config)
    with torch.no_grad():
        rows = image_rows(stacks.step_weights(), batch.pictures, config)
    flat = torch.zeros(batch.rows.ids.numel() + 1, rows.shape[1])
    flat[batch.pictures.positions] = rows.float()
    assert torch.equal(flat[:-1].abs().sum(1) > 0, batch.rows.image_mask.flatten())
    tower = VisionEncoder(config, {n: w.bfloat16() for n, w in weights.items()})
    picture = samples[0][1]
    served = []
    for canvas in picture.canvases:
        grid = (canvas.shape[0] // config.vision.patch_size, canvas.shape[1] // config.vision.patch_size)
        served.append(tower.encode(patches(canvas, config.vision), grid).float())
    own = flat[:-1].view(*batch.rows.ids.shape, -1)[batch.rows.image_mask]
    reference = torch.cat(served)
    assert float((own - reference).norm() / reference.norm()) < 0.02


def test_a_pack_is_the_same_in_every_process(config: ModelConfig) -> None:
    stage = COURSE[0]
    first, again = Examples(config, stage, 7)[3], Examples(config, stage, 7)[3]
    other, reseeded = Examples(config, stage, 7)[4], Examples(config, stage, 8)[3]
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other.ids)
    assert not np.array_equal(first.ids, reseeded.ids)
    assert (first.document > 0).mean() > 0.9
    assert len(first.pictures) <= stage.pictures_max


def test_too_long_a_sample_is_refused(
    samples: list[tuple[int, Encoded]], config: ModelConfig, hash_: EngramHash
) -> None:
    with pytest.raises(ValueError, match="a row holds 8: draw shorter"):
        pack(samples, (1, 8), PICTURES_MAX, config, hash_, KEEP)


def test_touching_spans_are_told_apart(samples: list[tuple[int, Encoded]], config: ModelConfig) -> None:
    sample = samples[0][1]
    starts = span_starts(sample, config)
    assert len(starts) == 2
    assert sample.image_mask[starts].all()
