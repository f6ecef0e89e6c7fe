"""A plan becomes the model's batch: token rows, look-back ids, image rows and masks."""

import pytest
import torch
from shoal.engines.core.plan import Plan, PlanItem, StepKind
from shoal.engines.core.request import EngineRequest, ImageSpan, SamplingParams
from shoal.engines.core.sequence import Sequence
from shoal.engines.run.inputs import ImageRows, build_batch

SPAN = ImageSpan(start=4, length=6, grid_rows=1, grid_columns=3, digest=b"one")
LATER = ImageSpan(start=12, length=6, grid_rows=1, grid_columns=3, digest=b"two")


def sequence(request_id: str, tokens: range, images: tuple[ImageSpan, ...] = (), slot: int = 1) -> Sequence:
    made = Sequence(EngineRequest(request_id, tuple(tokens), len(tokens), SamplingParams(), images))
    made.block_table, made.slot = [3, 7], slot
    return made


def plan(*items: tuple[Sequence, int, int], kind: StepKind = StepKind.PREFILL) -> Plan:
    return Plan(0, kind, tuple(PlanItem(s, start, rows, completes=True) for s, start, rows in items))


@pytest.fixture
def rows() -> ImageRows:
    made = ImageRows(hidden=2)
    made.add("a", SPAN, torch.arange(12.0).view(6, 2))
    made.add("a", LATER, torch.arange(12.0).view(6, 2) + 100)
    return made


def test_a_chunk_that_cuts_images_takes_only_its_rows(rows: ImageRows) -> None:
    a = sequence("a", range(100, 120), (SPAN, LATER))
    b = sequence("b", range(200, 210), slot=2)
    batch = build_batch(plan((b, 0, 3), (a, 6, 8)), rows, lookback=3)
    assert batch.token_ids.tolist() == [200, 201, 202, *range(106, 114)]
    assert batch.image_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 2
    assert batch.image_rows.tolist() == [[4, 5], [6, 7], [8, 9], [10, 11], [100, 101], [102, 103]]
    assert (batch.q_lens, batch.starts, batch.slots, batch.data_lens) == ((3, 8), (0, 6), (2, 1), (10, 20))
    assert batch.is_prefill


@pytest.mark.parametrize(
    ("start", "want"),
    [
        (0, [-1, -1, -1]),
        (2, [-1, 100, 101]),
        (4, [101, 102, 103]),
        (5, [-1, -1, -1]),
        (10, [-1, -1, -1]),
        (11, [-1, -1, 110]),
        (12, [-1, 110, 111]),
        (18, [-1, -1, -1]),
        (19, [-1, -1, 118]),
    ],
)
def test_an_image_blocks_itself_and_everything_older(rows: ImageRows, start: int, want: list[int]) -> None:
    a = sequence("a", range(100, 120), (SPAN, LATER))
    assert build_batch(plan((a, start, 1)), rows, lookback=3).lookback.tolist() == [want]


def test_a_decode_step_reads_what_was_generated(rows: ImageRows) -> None:
    b = sequence("b", range(200, 204))
    for token in (7, 8):
        b.push(token)
    batch = build_batch(plan((b, 5, 1), kind=StepKind.DECODE), rows, lookback=3)
    assert batch.token_ids.tolist() == [8]
    assert batch.lookback.tolist() == [[202, 203, 7]]
    assert batch.image_rows.shape == (0, 2)
    assert not batch.is_prefill


def test_rows_of_another_shape_are_refused(rows: ImageRows) -> None:
    assert "rows have shape (5, 2), its span takes (6, 2)" in rows.add("b", SPAN, torch.zeros(5, 2))
    assert not rows.has("b", b"one")


def test_a_missing_image_is_a_broken_invariant(rows: ImageRows) -> None:
    b = sequence("b", range(20), (SPAN,))
    with pytest.raises(AssertionError, match="without the rows of image"):
        build_batch(plan((b, 0, 8)), rows, lookback=3)


def test_dropped_rows_are_gone(rows: ImageRows) -> None:
    rows.drop("a", (SPAN, LATER))
    assert len(rows) == 0
