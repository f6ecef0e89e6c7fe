"""Which bytes of an engine's memory a hand-off carries, kind by kind, and their checksums."""

from collections.abc import Sequence

from shoal.cluster.core.handoff import Kind, KindBytes, KindSum
from shoal.cluster.core.transfer_plan import Pieces, Spans, kind_spans, unit_spans
from shoal.cluster.transfer import Buffer, KindDigest
from shoal.engines.core.layout import BlockLayout, SlotLayout

BLOCKS = "blocks"
SLOTS = "slots"

Part = tuple[Kind, Buffer, Spans]


class HandoffBytes:
    """The layout of one engine's registered buffers, seen as the four kinds of a ticket.

    `buffers` holds "blocks" and "slots": uint8, item i at i * stride. Both sides of a hand-off serve one model, so
    their layouts are equal; a difference shows as a byte count that the ticket does not expect.
    """

    def __init__(self, block: BlockLayout, slot: SlotLayout, buffers: dict[str, Buffer]) -> None:
        self._block_bytes = block.block_bytes
        self._slot_bytes = slot.slot_bytes
        self._buffers = buffers
        self._block_tokens = block.block_tokens
        self._sections = {
            kind: tuple((s.offset, s.bytes) for s in block.sections if s.kind == name)
            for kind, name in ((Kind.MAIN, "main"), (Kind.INDEX, "index"))
        }
        self._regions = {
            Kind.SLOT_STORED: ((0, slot.stored_bytes),),
            Kind.SLOT_DROPPED: ((slot.stored_bytes, slot.slot_bytes - slot.stored_bytes),),
        }

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self._block_tokens)

    def expected(self, tokens: int) -> tuple[KindBytes, ...]:
        """Bytes of each kind in a complete hand-off of a prompt of `tokens` tokens."""
        blocks = self.blocks_for(tokens)
        paged = (KindBytes(kind, blocks * sum(size for _, size in parts)) for kind, parts in self._sections.items())
        state = (KindBytes(kind, sum(size for _, size in parts)) for kind, parts in self._regions.items())
        return (*paged, *state)

    def block_pieces(self, sources: Sequence[int], targets: Sequence[int]) -> Pieces:
        """Whole blocks, neighbours merged."""
        return Pieces(BLOCKS, BLOCKS, unit_spans(sources, targets, self._block_bytes))

    def slot_pieces(self, source: int, target: int) -> Pieces:
        """One whole slot."""
        return Pieces(SLOTS, SLOTS, unit_spans((source,), (target,), self._slot_bytes))

    def block_parts(self, blocks: Sequence[int]) -> tuple[Part, ...]:
        """The paged kinds of these blocks, in order."""
        return tuple(
            (kind, self._buffers[BLOCKS], kind_spans(parts, blocks, self._block_bytes))
            for kind, parts in self._sections.items()
        )

    def slot_parts(self, slot: int) -> tuple[Part, ...]:
        """The slot's kinds."""
        return tuple(
            (kind, self._buffers[SLOTS], kind_spans(parts, (slot,), self._slot_bytes))
            for kind, parts in self._regions.items()
        )


class HandoffDigest:
    """Bytes and checksums of a hand-off while it is gathered, blocks in the order of the ticket, then the slot.

    `checksum` False counts bytes only and reports checksum 0 on both sides (manifest: transfer.checksum).
    """

    def __init__(self, checksum: bool) -> None:
        self._checksum = checksum
        self._digests = {kind: KindDigest(kind) for kind in Kind}
        self._counts = dict.fromkeys(Kind, 0)

    def update(self, parts: Sequence[Part]) -> None:
        """Feed the next bytes."""
        for kind, buffer, spans in parts:
            if self._checksum:
                self._digests[kind].update(buffer, spans)
            else:
                self._counts[kind] += int(spans[:, 1].sum())

    def value(self) -> tuple[KindSum, ...]:
        """Bytes and checksum of each kind so far."""
        if self._checksum:
            return tuple(digest.value() for digest in self._digests.values())
        return tuple(KindSum(kind, count, 0) for kind, count in self._counts.items())


def digest_of(parts: Sequence[Part], checksum: bool) -> tuple[KindSum, ...]:
    """Bytes and checksum of each kind of a whole hand-off."""
    digest = HandoffDigest(checksum)
    digest.update(parts)
    return digest.value()
