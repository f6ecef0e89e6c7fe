"""Device memory of blocks and slots: one owned buffer each; copies, clearing, swap in and out, checksums.

On a CPU both buffers are anonymous page-aligned mappings (zero, and without cost until touched), so that a transfer
library can register them once and write into them while the engine runs. Id 0 of both pools is the null item: padding
rows may write it, nobody reads it.
"""

import mmap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from shoal.engines.core.layout import BlockLayout, SlotLayout
from torch import Tensor

Buffer = npt.NDArray[np.uint8]


class DeviceMemory:
    """The block pool and the slot pool of one rank.

    `blocks` is uint8 [blocks_count, block_bytes], `slots` uint8 [slots_count, slot_bytes]; both live as long as this
    object and never move. Methods that take ids refuse the null id. Raises ValueError for rings that are longer than
    inference needs.
    """

    def __init__(self, blocks_count: int, block: BlockLayout, slots_count: int, slot: SlotLayout) -> None:
        if slot.ring_tokens != slot.inference_ring_tokens:
            raise ValueError(
                f"ring_tokens = {slot.ring_tokens} must equal inference_ring_tokens = {slot.inference_ring_tokens}: "
                "longer rings would have to be re-ordered on each swap; set ring_extra to 0"
            )
        self.block_layout = block
        self.slot_layout = slot
        self.blocks = page_aligned(blocks_count, block.block_bytes)
        self.slots = page_aligned(slots_count, slot.slot_bytes)

    def buffers(self) -> Mapping[str, Buffer]:
        """What a transfer library registers: one flat uint8 row a pool, item i at i * stride."""
        return {"blocks": self.blocks.numpy().reshape(-1), "slots": self.slots.numpy().reshape(-1)}

    def clone_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; target 0 means no copy."""
        clone(self.blocks, pairs)

    def clone_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole slots, (source, target) each; target 0 means no copy."""
        clone(self.slots, pairs)

    def zero_slots(self, ids: Iterable[int]) -> None:
        """Clear whole slots."""
        for i in ids:
            row(self.slots, i).zero_()

    def read_block(self, block: int) -> bytes:
        """One block's bytes: the payload of the grain it holds."""
        return row(self.blocks, block).numpy().tobytes()

    def write_block(self, block: int, payload: bytes) -> None:
        """Fill one block from a grain payload; raises ValueError on a wrong length and then changes nothing."""
        fill(row(self.blocks, block), payload, f"block {block}")

    def read_stored(self, slot: int, end: int) -> bytes:
        """The stored region of a slot whose sequence has computed exactly `end` tokens.

        Rings must have inference length (the constructor checks it), so no row moves. Ring rows that `end` does not
        reach hold an earlier sequence's bytes and are given out as zeros.
        """
        stored = row(self.slots, slot)[: self.slot_layout.stored_bytes].clone()
        if end < self.slot_layout.ring_tokens:
            for ring in self.slot_layout.rings:
                first = ring.offset + end * self.slot_layout.row_bytes
                stored[first : ring.offset + ring.bytes].zero_()
        return stored.numpy().tobytes()

    def write_stored(self, slot: int, payload: bytes) -> None:
        """Load a stored region into a slot and clear the rest of it; raises ValueError on a wrong length."""
        target = row(self.slots, slot)
        fill(target[: self.slot_layout.stored_bytes], payload, f"stored region of slot {slot}")
        target[self.slot_layout.stored_bytes :].zero_()

    def checksums(self, blocks: Sequence[int], slot: int) -> Mapping[str, int]:
        """XXH3 (64 bits) of a sequence's bytes, by the four kinds a hand-off checks, blocks in the given order."""
        sums = {kind: xxhash.xxh3_64() for kind in ("index", "main", "slot_stored", "slot_dropped")}
        for i in blocks:
            data = row(self.blocks, i).numpy().data
            for section in self.block_layout.sections:
                sums[section.kind].update(data[section.offset : section.offset + section.bytes])
        state, stored = row(self.slots, slot).numpy().data, self.slot_layout.stored_bytes
        sums["slot_stored"].update(state[:stored])
        sums["slot_dropped"].update(state[stored:])
        return {kind: digest.intdigest() for kind, digest in sums.items()}


def page_aligned(count: int, stride: int) -> Tensor:
    """A zeroed uint8 [count, stride] tensor that starts on a page; untouched pages take no memory."""
    assert count > 1, f"a pool of {count} has no room beside the null item; ask for 2 or more"
    buffer = mmap.mmap(-1, count * stride)
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8).reshape(count, stride))


def row(pool: Tensor, index: int) -> Tensor:
    """View of one item; the null item and ids outside the pool are a caller's mistake."""
    assert 0 < index < pool.shape[0], f"id {index} must be in 1..{pool.shape[0] - 1}"
    return pool[index]


def clone(pool: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy items inside a pool in the given order."""
    for source, target in pairs:
        if target:
            row(pool, target).copy_(row(pool, source))


def fill(target: Tensor, payload: bytes, what: str) -> None:
    """Overwrite a view with exactly as many bytes."""
    if len(payload) != target.shape[0]:
        raise ValueError(f"{what} takes {target.shape[0]} bytes, got {len(payload)}; is the payload of another model?")
    target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
