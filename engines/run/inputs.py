"""Plan to tensors: token rows, look-back ids, image rows, block tables and slots of one step."""

from collections.abc import Sequence

import torch
from shoal.engines.core.plan import Plan, PlanItem, StepKind
from shoal.engines.core.request import EngineRequest, ImageSpan
from shoal.engines.model.batch import Batch
from torch import Tensor

NO_TOKEN = -1


class ImageRows:
    """Embedding rows of the images of unfinished requests, kept until the request leaves the engine.

    They outlive their span's prefill because a preempted prompt is computed again.
    """

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self._rows: dict[tuple[str, bytes], Tensor] = {}

    def add(self, request_id: str, span: ImageSpan, rows: Tensor) -> str:
        """Keep [span.length, hidden] rows, delimiters included; or say why they cannot be this image's."""
        image = f"image {span.digest.hex()[:12]} of {request_id}"
        if tuple(rows.shape) != (span.length, self.hidden):
            return f"{image}: rows have shape {tuple(rows.shape)}, its span takes {(span.length, self.hidden)}"
        if not bool(torch.isfinite(rows).all()):
            return f"{image}: rows hold values that are not finite"
        self._rows[request_id, span.digest] = rows
        return ""

    def has(self, request_id: str, digest: bytes) -> bool:
        """Whether an image's rows are here."""
        return (request_id, digest) in self._rows

    def part(self, request_id: str, span: ImageSpan, start: int, end: int) -> Tensor:
        """Rows of the span's positions inside [start, end)."""
        rows = self._rows.get((request_id, span.digest))
        assert rows is not None, f"{request_id} was scheduled without the rows of image {span.digest.hex()[:12]}"
        return rows[max(start, span.start) - span.start : min(end, span.end) - span.start]

    def drop(self, request_id: str, images: Sequence[ImageSpan]) -> None:
        """Forget a request's images."""
        for span in images:
            self._rows.pop((request_id, span.digest), None)

    def __len__(self) -> int:
        return len(self._rows)


def image_objection(request: EngineRequest) -> str:
    """Why a request's images contradict each other; "" if they do not."""
    lengths: dict[bytes, int] = {}
    for span in request.images:
        if lengths.setdefault(span.digest, span.length) != span.length:
            return (
                f"image {span.digest.hex()[:12]} has spans of {lengths[span.digest]} and {span.length} tokens: "
                "equal digests mean equal rows"
            )
    return ""


def build_batch(plan: Plan, images: ImageRows, lookback: int) -> Batch:
    """The model's view of a plan with at least one item; rows in plan order.

    `lookback` is how many earlier ids Engram reads (its largest n-gram, less one). Image positions are those of the
    request's spans and nothing else: a sampled token with the image id is text.
    """
    items = plan.items
    rows = plan.rows
    ids: list[int] = []
    mask = torch.zeros(rows, dtype=torch.bool)
    embedded: list[Tensor] = []
    for item in items:
        offset = len(ids) - item.start
        ids.extend(item.token_ids)
        for span in item.images:
            mask[max(item.start, span.start) + offset : min(item.end, span.end) + offset] = True
            embedded.append(images.part(item.request_id, span, item.start, item.end))
    return Batch(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        q_lens=tuple(item.rows for item in items),
        starts=tuple(item.start for item in items),
        block_tables=tuple(item.block_table for item in items),
        slots=tuple(item.slot for item in items),
        data_lens=tuple(item.prompt_len for item in items),
        is_prefill=plan.kind is StepKind.PREFILL,
        lookback=torch.tensor([lookback_ids(item, lookback) for item in items], dtype=torch.int64),
        image_mask=mask,
        image_rows=torch.cat(embedded) if embedded else torch.empty(0, images.hidden),
        scored=scored_items(plan),
    )


def scored_items(plan: Plan) -> tuple[int, ...]:
    """Numbers of the items of a prefill plan whose prompts are scored."""
    if plan.kind is StepKind.DECODE:
        return ()
    return tuple(i for i, item in enumerate(plan.items) if item.sequence.request.prompt_logprobs is not None)


def lookback_ids(item: PlanItem, count: int) -> list[int]:
    """The `count` ids before the item's first row, nearest last; -1 where there is none.

    An image blocks: its positions and everything older read as -1 (model notes, Engram: image tokens block all longer
    n-grams of the text that follows).
    """
    ids = list(item.lookback(count))
    first = item.start - len(ids)
    for span in item.sequence.request.images:
        if span.start < item.start and span.end > first:
            ids[min(span.end, item.start) - first - 1] = NO_TOKEN
    return padded_lookback(ids, count)


def padded_lookback(ids: Sequence[int], count: int) -> list[int]:
    """`count` ids out of the last ones before a row, NO_TOKEN inside an image: that and everything older is none."""
    hidden = max((i + 1 for i, token in enumerate(ids) if token == NO_TOKEN), default=0)
    return [NO_TOKEN] * (count - len(ids) + hidden) + list(ids[hidden:])
