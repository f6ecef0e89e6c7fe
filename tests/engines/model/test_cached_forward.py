"""Steps over blocks and slots: equal to the whole sequence, whatever the chunks, batches and placement."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shoal.engines.config import Truncation, TruncationMode
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.decoder import Model
from shoal.engines.model.numerics import Mode, Numerics
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
ORACLE = ROOT / "tests" / "data" / "oracle"
BLOCK_TOKENS = 32
OFF = Truncation()


@pytest.fixture(scope="module")
def exact() -> Model:
    return Model.load(ORACLE, Mode.N0)


@pytest.fixture(scope="module")
def serving(exact: Model) -> Model:
    return dataclasses.replace(exact, numerics=Numerics.of(Mode.N1))


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(ORACLE / "reference.npz") as arrays:
        return dict(arrays)


@dataclasses.dataclass
class Text:
    """One sequence in a cache: what it is, where it lives and how far it has come."""

    ids: list[int]
    mask: Tensor
    image_rows: Tensor
    table: list[int]
    slot: int
    data_len: int
    cached: int = 0

    def before(self, count: int) -> list[int]:
        at = range(self.cached - count, self.cached)
        return [self.ids[i] if i >= 0 and not (i < len(self.mask) and self.mask[i]) else -1 for i in at]


class World:
    """A model and caches full of random bytes, from which only what was written may be read."""

    def __init__(self, model: Model, seed: int, truncation: Truncation = OFF, blocks: int = 80) -> None:
        self.model, self.truncation, self.random = model, truncation, random.Random(seed)
        self.caches = Caches.allocate(model.cache_shape(BLOCK_TOKENS), blocks, 8)
        generator = torch.Generator().manual_seed(seed)
        self.caches.blocks.random_(0, 256, generator=generator)
        self.caches.slots.random_(0, 256, generator=generator)
        self.free_blocks, self.free_slots = list(range(1, blocks)), list(range(1, 8))
        self.random.shuffle(self.free_blocks)
        self.random.shuffle(self.free_slots)

    def add(self, ids: Sequence[int], room: int, mask: Tensor | None = None, image_rows: Tensor | None = None) -> Text:
        mask = torch.zeros(len(ids), dtype=torch.bool) if mask is None else mask
        rows = torch.empty(0, self.model.config.hidden) if image_rows is None else image_rows
        table = [self.free_blocks.pop() for _ in range(-(-(len(ids) + room) // BLOCK_TOKENS))]
        return Text(list(ids), mask, rows, table, self.free_slots.pop(), data_len=len(ids))

    def step(self, texts: Sequence[Text], counts: Sequence[int], is_prefill: bool) -> Tensor:
        """Advance each text by so many of its tokens in one batch."""
        depth = self.model.engram.lookback
        pieces, masks, images = [], [], []
        for text, count in zip(texts, counts, strict=True):
            end = text.cached + count
            pieces += text.ids[text.cached : end]
            mask = torch.zeros(count, dtype=torch.bool)
            known = text.mask[text.cached : end]
            mask[: len(known)] = known
            masks.append(mask)
            first = int(text.mask[: text.cached].sum())
            images.append(text.image_rows[first : first + int(mask.sum())])
        batch = Batch(
            token_ids=torch.tensor(pieces),
            q_lens=tuple(counts),
            starts=tuple(t.cached for t in texts),
            block_tables=tuple(t.table for t in texts),
            slots=tuple(t.slot for t in texts),
            data_lens=tuple(t.data_len for t in texts),
            is_prefill=is_prefill,
            lookback=torch.tensor([t.before(depth) for t in texts]),
            image_mask=torch.cat(masks),
            image_rows=torch.cat(images),
        )
        for text, count in zip(texts, counts, strict=True):
            text.cached += count
        return self.model.logits(self.model.forward(batch, self.caches, self.truncation))

    def prefill(self, text: Text, chunks: Sequence[int]) -> dict[int, Tensor]:
        """Logits after the last row of each chunk, by position; chunks repeat until the prompt ends."""
        found, turn = {}, 0
        while text.cached < text.data_len:
            count = min(chunks[turn % len(chunks)], text.data_len - text.cached)
            at = text.cached + count - 1
            found[at] = self.step([text], [count], is_prefill=True)[0]
            turn += 1
        return found

    def feed(self, text: Text) -> dict[int, Tensor]:
        """Decode the text's own tokens that are not cached yet; logits by position."""
        found = {}
        for at in range(text.cached, len(text.ids)):
            found[at] = self.step([text], [1], is_prefill=False)[0]
        return found

    def decode(self, texts: Sequence[Text], count: int) -> None:
        """Append `count` greedy tokens to each text; the last one of each is not yet cached."""
        for _ in range(count):
            logits = self.step(texts, [1] * len(texts), is_prefill=False)
            for text, row in zip(texts, logits, strict=True):
                text.ids.append(int(row.argmax()))


def whole(model: Model, text: Text, truncation: Truncation = OFF) -> Tensor:
    ids = torch.tensor(text.ids)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[: len(text.mask)] = text.mask
    return model.logits(model.forward_full(ids, mask, text.image_rows, truncation, text.data_len).hidden)


def prompt(reference: dict[str, np.ndarray], name: str, length: int | None = None) -> list[int]:
    return [int(i) for i in reference[f"{name}.input_ids"][:length]]


def span(values: Tensor) -> float:
    return float(values.max() - values.min())


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    chunks=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 1000), decoded=st.integers(0, 4)
)
def test_any_chunks_and_placement_compute_the_whole_sequence(
    exact: Model, reference: dict[str, np.ndarray], chunks: list[int], seed: int, decoded: int
) -> None:
    if max(chunks) < 6:
        chunks = [*chunks, 40]
    world = World(exact, seed)
    text = world.add(prompt(reference, "long", 110), room=8)
    found = world.prefill(text, chunks)
    text.ids += prompt(reference, "long", 110 + decoded)[110:]
    found |= world.feed(text)
    full = whole(exact, text)
    for position, logits in found.items():
        assert float((logits - full[position]).abs().max()) <= 1e-4 * span(full)


@pytest.mark.parametrize("mode", [TruncationMode.MASK, TruncationMode.COMPACT])
@pytest.mark.parametrize("chunks", [[150], [37], [128, 5], [64, 1, 1]])
def test_truncated_chunks_compute_the_truncated_whole(
    exact: Model, reference: dict[str, np.ndarray], mode: TruncationMode, chunks: list[int]
) -> None:
    keep = exact.config.keep_min + 3
    world = World(exact, 5, Truncation(mode, keep))
    text = world.add(prompt(reference, "long", 150), room=40)
    found = world.prefill(text, chunks)
    text.ids += prompt(reference, "long", 156)[150:]
    found |= world.feed(text)
    full = whole(exact, text, Truncation(TruncationMode.MASK, keep))
    untruncated = whole(exact, text)
    assert float((full[-1] - untruncated[-1]).abs().max()) > 1e-3 * span(full), "truncation must change something"
    for position, logits in found.items():
        if position >= text.data_len - keep:
            assert float((logits - full[position]).abs().max()) <= 1e-4 * span(full)


def test_compact_keeps_the_rows_of_mask(exact: Model, reference: dict[str, np.ndarray]) -> None:
    ids = torch.tensor(prompt(reference, "long", 200))
    mask, rows, keep = torch.zeros(200, dtype=torch.bool), torch.empty(0, exact.config.hidden), exact.config.keep_min
    masked, compact = (
        exact.forward_full(ids, mask, rows, Truncation(mode, keep)).hidden
        for mode in (TruncationMode.MASK, TruncationMode.COMPACT)
    )
    assert compact.shape[0] == keep
    assert float((compact - masked[-keep:]).abs().max()) <= 1e-5 * span(masked)


def test_a_placeholder_row_writes_no_decoder_ring(exact: Model, reference: dict[str, np.ndarray]) -> None:
    world = World(exact, 3, Truncation(TruncationMode.COMPACT, exact.config.keep_min))
    text = world.add(prompt(reference, "long", 200), room=0)
    first = world.caches.slot_layout.ring(exact.config.n_prefill_layer).offset
    last = world.caches.slot_layout.accumulators[0].offset
    before = world.caches.slots[text.slot, first:last].clone()
    world.step([text], [40], is_prefill=True)
    assert torch.equal(world.caches.slots[text.slot, first:last], before)
    assert not torch.equal(world.caches.slots[text.slot, : last - first], before)


@pytest.mark.parametrize("chunks", [[97], [13], [1, 30]])
def test_chunks_may_split_an_image(exact: Model, reference: dict[str, np.ndarray], chunks: list[int]) -> None:
    mask = torch.from_numpy(reference["image.token_types"] >= 0)
    rows = torch.randn(int(mask.sum()), exact.config.hidden, generator=torch.Generator().manual_seed(1))
    world = World(exact, 11)
    text = world.add(prompt(reference, "image"), 0, mask, rows)
    found = world.prefill(text, chunks)
    full = whole(exact, text)
    assert max(float((row - full[at]).abs().max()) for at, row in found.items()) <= 1e-4 * span(full)


@pytest.mark.parametrize("mode", [TruncationMode.OFF, TruncationMode.COMPACT])
def test_serving_tokens_do_not_depend_on_chunks_or_company(
    serving: Model, reference: dict[str, np.ndarray], mode: TruncationMode
) -> None:
    """Bfloat16 and quantised caches: each answer alone, in one chunk, is the answer in company and in many chunks."""
    truncation = Truncation(mode, serving.config.keep_min + 1)
    prompts = [prompt(reference, "long", 120), prompt(reference, "long")[50:91], prompt(reference, "short")]
    alone = []
    for ids in prompts:
        world = World(serving, 1, truncation)
        text = world.add(ids, room=12)
        text.ids.append(int(world.prefill(text, [len(ids)])[len(ids) - 1].argmax()))
        world.decode([text], 10)
        alone.append(text.ids)
    for seed, chunk in ((2, 7), (3, 31)):
        world = World(serving, seed, truncation)
        texts = [world.add(ids, room=12) for ids in prompts]
        while waiting := [t for t in texts if t.cached < t.data_len]:
            counts = [min(chunk + 3 * i, t.data_len - t.cached) for i, t in enumerate(waiting)]
            logits = world.step(waiting, counts, is_prefill=True)
            for text, row in zip(waiting, logits, strict=True):
                if text.cached == text.data_len:
                    text.ids.append(int(row.argmax()))
        world.decode(texts, 10)
        assert [t.ids for t in texts] == alone


def test_serving_bytes_do_not_depend_on_chunks(serving: Model, reference: dict[str, np.ndarray]) -> None:
    """What a hand-off or the store copies is equal to the byte, however the prompt was cut."""
    found = []
    for seed, chunks in ((1, [130]), (2, [32]), (3, [23, 5])):
        world = World(serving, seed)
        world.caches.blocks.zero_()
        world.caches.slots.zero_()
        text = world.add(prompt(reference, "long", 130), room=0)
        world.prefill(text, chunks)
        found.append((world.caches.blocks[text.table], world.caches.slots[text.slot]))
    for blocks, slot in found[1:]:
        assert torch.equal(blocks, found[0][0])
        assert torch.equal(slot, found[0][1])


def test_a_moved_sequence_continues_alike(serving: Model, reference: dict[str, np.ndarray]) -> None:
    """Copying block and slot bytes to other ids, or another engine, is all that a hand-off needs."""
    here, there = World(serving, 1), World(serving, 2)
    text = here.add(prompt(reference, "long", 75), room=20)
    text.ids.append(int(here.prefill(text, [75])[74].argmax()))
    moved = there.add(text.ids[:75], room=20)
    there.caches.blocks[moved.table] = here.caches.blocks[text.table]
    there.caches.slots[moved.slot] = here.caches.slots[text.slot]
    moved.ids, moved.cached = list(text.ids), text.cached
    here.decode([text], 8)
    there.decode([moved], 8)
    assert moved.ids == text.ids


@pytest.mark.parametrize("name", ["draft1", "draft2"])
def test_drafts_out_of_the_rings_are_the_oracle_drafts(
    exact: Model, reference: dict[str, np.ndarray], name: str
) -> None:
    source, position = str(reference[f"{name}.prompt"]), int(reference[f"{name}.position"])
    world = World(exact, 4)
    text = world.add(prompt(reference, source, position + 1), room=0)
    world.prefill(text, [19])
    golden, at = torch.tensor([int(reference[f"{name}.golden"])]), torch.tensor([position])
    block = exact.draft(golden, at, torch.tensor([text.slot]), world.caches)
    assert block.tokens[0].tolist() == reference[f"{name}.tokens"].tolist()
    want = torch.from_numpy(reference[f"{name}.logits"])
    assert float((block.logits[0] - want).abs().max()) <= 1e-4 * span(want)


def test_a_short_block_table_is_refused(exact: Model, reference: dict[str, np.ndarray]) -> None:
    world = World(exact, 1)
    text = world.add(prompt(reference, "long", 70), room=0)
    text.table = text.table[:2]
    with pytest.raises(ValueError, match="holds 64 tokens, the sequence has 70; reserve blocks"):
        world.step([text], [70], is_prefill=True)


def test_caches_of_another_mode_are_refused(exact: Model, serving: Model, reference: dict[str, np.ndarray]) -> None:
    world = World(exact, 1)
    text = world.add(prompt(reference, "short"), room=0)
    world.model = serving
    with pytest.raises(ValueError, match="does not fit the numeric mode"):
        world.step([text], [5], is_prefill=True)


LONG_CHUNK = """
import sys, torch
from pathlib import Path
def peak_kib():  # of this program alone: getrusage also counts the process that it was forked from
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1])
sys.path.insert(0, "tests/engines/model")
from test_cached_forward import ORACLE, Model, Truncation, TruncationMode, World
world = World(Model.load(ORACLE), 1, Truncation(TruncationMode.COMPACT, 30), blocks=70)
text = world.add([5 + i % 900 for i in range(2048)], room=0)
world.step([world.add([7] * 40, room=0)], [40], True)
before = peak_kib()
world.step([text], [2048], is_prefill=True)
print((peak_kib() - before) >> 10)
"""


def test_a_long_chunk_needs_bounded_memory() -> None:
    """2,048 rows in one step take less than 150 MiB above the weights and caches."""
    done = subprocess.run(
        [sys.executable, "-c", LONG_CHUNK], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert 0 < int(done.stdout.split()[-1]) < 150
