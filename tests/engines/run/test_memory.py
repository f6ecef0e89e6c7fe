"""Blocks and slots are moved byte for byte, only where asked, and never with another sequence's bytes."""

import mmap

import pytest
import torch
from shoal.engines.core.layout import CacheShape, block_layout, slot_layout
from shoal.engines.run.memory import DeviceMemory

SHAPE = CacheShape(
    ratios=(0, 2, 2, 1, 1), kv_sources=(1, 3), index_sources=(1, 3), n_prefill_layer=3, drafter_layers=1, window=16,
    backtracking=6, head_dim=64, index_dim=32, block_tokens=8,
)  # fmt: skip


def filled() -> DeviceMemory:
    memory = DeviceMemory(6, block_layout(SHAPE), 4, slot_layout(SHAPE))
    generator = torch.Generator().manual_seed(1)
    for pool in (memory.blocks, memory.slots):
        pool.copy_(torch.randint(0, 256, pool.shape, generator=generator, dtype=torch.uint8))
    return memory


def test_pools_start_on_pages_and_hold_zeros() -> None:
    memory = DeviceMemory(6, block_layout(SHAPE), 4, slot_layout(SHAPE))
    for name, buffer in memory.buffers().items():
        assert buffer.ctypes.data % mmap.PAGESIZE == 0, name
        assert buffer.ndim == 1
        assert not buffer.any()
    assert memory.buffers()["blocks"].ctypes.data == memory.blocks.data_ptr(), "a view, not a copy"


def test_a_grain_survives_a_round_trip_through_another_engine() -> None:
    source, target = filled(), DeviceMemory(6, block_layout(SHAPE), 4, slot_layout(SHAPE))
    payload = source.read_block(3)
    target.write_block(5, payload)
    assert torch.equal(target.blocks[5], source.blocks[3])
    assert not target.blocks[:5].any(), "no other block changed"


def test_an_anchor_survives_a_round_trip_and_clears_the_dropped_region() -> None:
    source, target = filled(), filled()
    stored = source.slot_layout.stored_bytes
    payload = source.read_stored(2, end=64)
    assert len(payload) == source.slot_layout.stored_anchor_bytes
    target.write_stored(1, payload)
    assert torch.equal(target.slots[1, :stored], source.slots[2, :stored])
    assert not target.slots[1, stored:].any()


def test_ring_rows_of_an_earlier_owner_are_not_given_out() -> None:
    memory = filled()
    layout = memory.slot_layout
    payload = torch.frombuffer(bytearray(memory.read_stored(1, end=8)), dtype=torch.uint8)
    for ring in layout.rings[: SHAPE.n_prefill_layer]:
        used = 8 * layout.row_bytes
        assert torch.equal(payload[ring.offset :][:used], memory.slots[1, ring.offset :][:used])
        assert not payload[ring.offset + used : ring.offset + ring.bytes].any()


def test_clones_and_zeros_touch_only_their_targets() -> None:
    memory = filled()
    blocks, slots = memory.blocks.clone(), memory.slots.clone()
    memory.clone_blocks([(1, 2), (3, 0)])
    memory.clone_slots([(1, 3)])
    memory.zero_slots([2])
    assert torch.equal(memory.blocks[2], blocks[1])
    assert torch.equal(memory.blocks[[0, 1, 3, 4, 5]], blocks[[0, 1, 3, 4, 5]])
    assert torch.equal(memory.slots[3], slots[1])
    assert not memory.slots[2].any()
    assert torch.equal(memory.slots[:2], slots[:2])


def test_wrong_payloads_and_ids_are_refused() -> None:
    memory = filled()
    before = memory.blocks.clone()
    with pytest.raises(ValueError, match=r"block 3 takes \d+ bytes, got 7"):
        memory.write_block(3, b"1234567")
    assert torch.equal(memory.blocks, before)
    for block in (0, 6, -1):
        with pytest.raises(AssertionError, match="must be in 1"):
            memory.read_block(block)


def test_longer_rings_are_refused() -> None:
    longer = CacheShape(**{f: getattr(SHAPE, f) for f in SHAPE.__slots__} | {"ring_extra": 8})
    with pytest.raises(ValueError, match="set ring_extra to 0"):
        DeviceMemory(6, block_layout(longer), 4, slot_layout(longer))


@pytest.mark.parametrize("kind", ["index", "main", "slot_stored", "slot_dropped"])
def test_checksums_notice_one_flipped_bit_of_their_kind_alone(kind: str) -> None:
    memory = filled()
    before = memory.checksums([1, 2], 3)
    offset = {"slot_stored": 5, "slot_dropped": memory.slot_layout.stored_bytes + 5}.get(kind)
    if offset is None:
        section = next(s for s in memory.block_layout.sections if s.kind == kind)
        memory.blocks[2, section.offset + 1] ^= 1
    else:
        memory.slots[3, offset] ^= 1
    after = memory.checksums([1, 2], 3)
    assert {k for k in before if before[k] != after[k]} == {kind}
    assert memory.checksums([2, 1], 3) != after, "order matters"
