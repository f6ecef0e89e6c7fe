"""Published byte counts, section by section, and the ring arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.core.layout import (
    CacheShape,
    block_layout,
    blocks_needed,
    ring_load,
    ring_select,
    ring_slot,
    slot_layout,
    slots_count,
)

PUBLISHED = CacheShape(
    ratios=(0, 0, *(2,) * 18, *(1,) * 20),
    kv_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20),
    n_prefill_layer=20,
    drafter_layers=3,
    window=128,
    backtracking=6,
)
TINY = CacheShape(
    ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1),
    kv_sources=(2, 4, 6),
    index_sources=(2, 4, 6),
    n_prefill_layer=6,
    drafter_layers=3,
    window=16,
    backtracking=6,
)


def test_block_of_the_published_model():
    """Model notes 9.2: index before main, ratio 2: 4,352 + 18,432, ratio 1: 8,704 + 36,864, aligned to 1,152."""
    layout = block_layout(PUBLISHED)
    assert layout.block_bytes == 114_048
    assert [(s.layer, s.kind, s.offset, s.bytes) for s in layout.sections] == [
        (2, "index", 0, 4_352),
        (2, "main", 4_352, 18_432),
        (8, "index", 22_784, 4_352),
        (8, "main", 27_136, 18_432),
        (14, "index", 45_568, 4_352),
        (14, "main", 49_920, 18_432),
        (20, "index", 68_352, 8_704),
        (20, "main", 77_056, 36_864),
    ]
    assert sum(s.bytes for s in layout.sections) == 890 * 128
    assert (PUBLISHED.swa_row_bytes, PUBLISHED.main_row_bytes, PUBLISHED.index_row_bytes) == (528, 288, 68)


def test_slot_of_the_published_model():
    """Model notes 9.3: 20 stored rings, 23 dropped ones, three accumulators of 7 rows."""
    layout = slot_layout(PUBLISHED)
    assert layout.stored_bytes == layout.stored_anchor_bytes == 1_415_040
    assert layout.slot_bytes == 3_128_928
    assert layout.ring_tokens == 134
    assert [ring.offset for ring in layout.rings] == [70_752 * layer for layer in range(43)]
    assert layout.ring(20).offset == layout.stored_bytes
    assert [(a.layer, a.rows, a.bytes) for a in layout.accumulators] == [
        (2, 7, 28_672),
        (8, 7, 28_672),
        (14, 7, 28_672),
    ]
    assert layout.accumulator(2).offset == 43 * 70_752
    assert layout.slot_bytes - layout.accumulators[-1].offset - layout.accumulators[-1].bytes == 576


def test_block_and_slot_of_the_tiny_model():
    assert block_layout(TINY).block_bytes == 92_160
    layout = slot_layout(TINY)
    assert layout.ring_tokens == 22
    assert layout.stored_bytes == 6 * 22 * 528 == 69_696
    used = 13 * 22 * 528 + 2 * 28_672
    assert layout.slot_bytes == -(-used // 1056) * 1056


def test_longer_rings_for_storing():
    """Notes 10.3: with extra state the ring has 134 + 128 + 140 = 402 positions; what is stored stays the same."""
    longer = CacheShape(**{name: getattr(PUBLISHED, name) for name in PUBLISHED.__slots__} | {"ring_extra": 268})
    layout = slot_layout(longer)
    assert layout.ring_tokens == 402
    assert layout.stored_bytes == 20 * 212_256
    assert layout.stored_anchor_bytes == 1_415_040


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_sources": (0,)}, "kv_sources has layer 0: it must be a layer whose ratio is at least 1"),
        ({"kv_sources": (6, 2)}, "must be ascending"),
        ({"n_prefill_layer": 99}, "n_prefill_layer = 99 must lie in 0..10"),
        ({"block_tokens": 127}, "block_tokens = 127 must be a multiple of ratios"),
        ({"window": 0}, "window = 0 must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_laid_out_names_its_field(change, message):
    fields = {name: getattr(TINY, name) for name in TINY.__slots__}
    with pytest.raises(ValueError, match=message):
        CacheShape(**fields | change)


def test_a_layer_without_a_section_is_an_error_that_lists_the_owners():
    with pytest.raises(KeyError, match="layer 3 owns no main section"):
        block_layout(TINY).section(3, "main")
    with pytest.raises(KeyError, match="layer 6 has no accumulator"):
        slot_layout(TINY).accumulator(6)


@given(end=st.integers(0, 2000), small=st.integers(1, 40), extra=st.integers(0, 60))
def test_a_window_survives_the_way_to_the_store_and_back(end, small, extra):
    """Fill a long ring by position, select the window, load it into a clean long ring: every position is back."""
    long = small + extra
    source = {ring_slot(p, long): p for p in range(end - long, end)}
    stored = {target: source[row] for target, row in ring_select(end, long, small)}
    assert stored == {p % small: p for p in range(end - small, end)}
    back = {target: stored[row] for target, row in ring_load(end, small, long)}
    assert back == {ring_slot(p, long): p for p in range(end - small, end)}


def test_selecting_a_longer_window_than_the_ring_is_refused():
    with pytest.raises(ValueError, match="must not exceed source_tokens"):
        ring_select(10, 6, 8)


def test_counts():
    assert [blocks_needed(n, 128) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    assert slots_count(16) == 20
