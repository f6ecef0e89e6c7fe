"""Where a prompt may be cut: token budget, alignment, wanted anchors, and never inside an image."""

from typing import NamedTuple

from shoal.engines.core.sequence import Sequence


class Cut(NamedTuple):
    """`rows` of the prompt from `cached` on; `next_checkpoint` is the sequence's checkpoint index afterwards."""

    rows: int
    next_checkpoint: int


def cut_chunk(sequence: Sequence, room: int, budget: int, is_first: bool, may_cut: bool) -> Cut:
    """The next chunk of a prompt (engine runtime notes 3, rules 7 to 9).

    `room` is the aligned rest of the step's token budget, `budget` the unaligned rest; `is_first` tells that the step
    is empty so far, which lets a chunk grow to swallow an image whole; checkpoints matter only where prompts may be
    cut. `rows` is 0 when nothing of the prompt fits.
    """
    cached = sequence.cached
    rows = min(sequence.len - cached, room)
    checkpoint = sequence.next_checkpoint
    if may_cut:
        rows, checkpoint = _cut_at_checkpoint(sequence, rows)
    if cached + rows < sequence.len:
        rows = _keep_images_whole(sequence, rows, budget, is_first)
    return Cut(rows, checkpoint)


def _cut_at_checkpoint(sequence: Sequence, rows: int) -> tuple[int, int]:
    """End at the next wanted anchor if it is within reach; it counts as consumed even if an image moves the cut."""
    checkpoints = sequence.request.checkpoints
    index = sequence.next_checkpoint
    while index < len(checkpoints) and checkpoints[index] <= sequence.cached:
        index += 1
    if index < len(checkpoints) and checkpoints[index] <= sequence.cached + rows:
        return checkpoints[index] - sequence.cached, index + 1
    return rows, index


def _keep_images_whole(sequence: Sequence, rows: int, budget: int, is_first: bool) -> int:
    image = sequence.image_at(sequence.cached + rows)
    if image is None:
        return rows
    grown = image.end - sequence.cached
    if is_first and grown <= budget:
        return grown
    return max(0, image.start - sequence.cached)
