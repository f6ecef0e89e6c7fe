"""Ranks that share out the rows of a prefill keep the caches, and give the answers, of one rank: to the bit."""

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rank_threads import together
from shoal.engines.config import Truncation, TruncationMode
from shoal.engines.core.mirror import rank_spans
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.decoder import Model
from shoal.engines.model.moe import ALL_HERE, MoeWeights, Routing
from shoal.engines.model.numerics import Mode, Numerics
from shoal.engines.model.row_split import ALONE, RowExchange, RowSplit
from shoal.engines.run.grouped_experts import share_experts
from shoal.engines.run.rank_group import GlooGroup
from torch import Tensor

ORACLE = Path(__file__).resolve().parents[2] / "data" / "oracle"
GRAIN, KEEP = 16, 24
PROMPTS = (90, 33, 5)
CHUNKS = ((40, 0, 5), (1, 33, 0), (49, 0, 0))
"""Rows of each prompt in each step: several sequences, a lone row, and a chunk that ends before what is kept."""
IMAGE = range(20, 44)
"""Positions of the first prompt that an image takes: a chunk ends inside."""


@dataclass
class Outcome:
    """What each step returned, and the caches at the end."""

    hidden: list[Tensor]
    caches: Caches


def texts(model: Model) -> tuple[list[list[int]], Tensor]:
    """The prompts' ids, and the image's rows."""
    dice = random.Random(3)
    ids = [[dice.randrange(3, 900) for _ in range(length + 2)] for length in PROMPTS]
    ids[0][IMAGE.start : IMAGE.stop] = [model.config.image_token_id] * len(IMAGE)
    return ids, torch.randn(len(IMAGE), model.config.hidden, generator=torch.Generator().manual_seed(4))


def prefill(model: Model, truncation: Truncation) -> Outcome:
    """All chunks, then two decode steps, in caches that start as garbage."""
    generator = torch.Generator().manual_seed(5)
    caches = Caches.allocate(model.cache_shape(GRAIN), 16, 5)
    caches.blocks.random_(0, 256, generator=generator)
    caches.slots.random_(0, 256, generator=generator)
    tables, slots = ((7, 3, 9, 12, 4, 15), (1, 14, 8), (5,)), (2, 4, 1)
    ids, image_rows = texts(model)
    cached, hidden = [0] * len(ids), []
    for counts in (*CHUNKS, (1, 1, 1), (1, 1, 1)):
        chosen = [i for i, count in enumerate(counts) if count]
        spans = [(i, range(cached[i], cached[i] + counts[i])) for i in chosen]
        mask = torch.tensor([i == 0 and at in IMAGE for i, span in spans for at in span])
        in_image = [at - IMAGE.start for i, span in spans for at in span if i == 0 and at in IMAGE]
        before = [range(span.start - model.engram.lookback, span.start) for _, span in spans]
        batch = Batch(
            token_ids=torch.tensor([ids[i][at] for i, span in spans for at in span]),
            q_lens=tuple(len(span) for _, span in spans),
            starts=tuple(span.start for _, span in spans),
            block_tables=tuple(tables[i] for i in chosen),
            slots=tuple(slots[i] for i in chosen),
            data_lens=tuple(PROMPTS[i] for i in chosen),
            is_prefill=counts in CHUNKS,
            lookback=torch.tensor(
                [
                    [-1 if at < 0 or (i == 0 and at in IMAGE) else ids[i][at] for at in row]
                    for (i, _), row in zip(spans, before, strict=True)
                ]
            ),
            image_mask=mask,
            image_rows=image_rows[in_image],
        )
        hidden.append(model.forward(batch, caches, truncation))
        for i in chosen:
            cached[i] += counts[i]
    return Outcome(hidden, caches)


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    for step, (ours, theirs) in enumerate(zip(found.hidden, wanted.hidden, strict=True)):
        assert torch.equal(ours, theirs), f"hidden rows of step {step}"
    assert torch.equal(found.caches.blocks, wanted.caches.blocks)
    assert torch.equal(found.caches.slots, wanted.caches.slots)


@pytest.mark.parametrize(("mode", "size"), list(zip(TruncationMode, (2, 2, 3), strict=True)))
def test_ranks_compute_what_one_computes(narrow_drafting: Model, mode: TruncationMode, size: int) -> None:
    """Caches, the drafter's rings among them, and hidden rows on every rank."""
    truncation = Truncation(mode, KEEP)
    alone = prefill(narrow_drafting, truncation)
    assert bool(torch.isfinite(torch.cat(alone.hidden)).all())
    for found in together(size, lambda group: prefill(shared(narrow_drafting, group), truncation)):
        assert_equal(found, alone)


@pytest.mark.parametrize(("mode", "size"), [(Mode.N0, 3), (Mode.N2, 2)])
def test_exact_caches_and_quantised_inputs_too(mode: Mode, size: int) -> None:
    """The oracle's model; even where activations and caches keep 24 bits, no bit differs."""
    model, truncation = Model.load(ORACLE, mode), Truncation(TruncationMode.COMPACT, KEEP)
    alone = prefill(model, truncation)
    for found in together(size, lambda group: prefill(shared(model, group), truncation)):
        assert_equal(found, alone)


def test_ranks_may_share_out_experts_too(narrow_drafting: Model) -> None:
    truncation = Truncation(TruncationMode.COMPACT, KEEP)
    alone = prefill(narrow_drafting, truncation)
    for found in together(
        2, lambda group: prefill(shared(share_experts(narrow_drafting, group).model, group), truncation)
    ):
        assert_equal(found, alone)


class Counting:
    """ExpertsPort that counts the rows of each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(
        self, layer: int, numerics: Numerics, x: Tensor, weights: MoeWeights, routing: Routing, limit: float
    ) -> Tensor:
        self.rows.append(len(x))
        return ALL_HERE.run(layer, numerics, x, weights, routing, limit)

    def join(self, numerics: Numerics, hidden: int) -> None:
        raise AssertionError("every rank has rows")


def test_each_rank_computes_its_own_rows_only(narrow: Model) -> None:
    """In layers of the suffix, the kept rows are split anew."""
    size = 3

    def work(group: GlooGroup) -> list[int]:
        counting = Counting()
        prefill(shared(dataclasses.replace(narrow, experts=counting), group), Truncation(TruncationMode.COMPACT, KEEP))
        return counting.rows

    def rows_of(counts: tuple[int, ...], rank: int) -> int:
        return sum(span.rows for span in rank_spans([count for count in counts if count], rank, size))

    before, after = narrow.config.n_prefill_layer, narrow.config.n_layers - narrow.config.n_prefill_layer
    kept = ((1, 0, 5), (1, 24, 0), (24, 0, 0))
    for rank, rows in enumerate(together(size, work)):
        wanted = [
            rows_of(counts, rank)
            for all_rows, some_rows in zip((*CHUNKS, (1, 1, 1), (1, 1, 1)), (*kept, (1, 1, 1), (1, 1, 1)), strict=True)
            for counts in [all_rows] * before + [some_rows] * after
        ]
        assert rows == wanted


def rows_of_every_type(count: int) -> list[Tensor]:
    """Rows that say which they are, in the types and shapes that travel."""
    at = torch.arange(count)
    return [
        at,
        at % 3 == 0,
        (at % 251).to(torch.uint8).unsqueeze(1).repeat(1, 5),
        torch.complex(at.to(torch.float64), -at.to(torch.float64)).view(-1, 1, 1).repeat(1, 2, 3),
        at.to(torch.float32).unsqueeze(1),
        at.new_empty(count, 0, 4),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lens", [[1], [7, 1, 12], [30], [2, 2]])
def test_rows_come_together(size: int, lens: list[int]) -> None:
    """The contract of RowExchange, whoever keeps it."""
    rows = rows_of_every_type(sum(lens))
    wanted = torch.cumsum(torch.tensor(lens), 0) - 1

    def work(exchange: RowExchange) -> None:
        split = RowSplit(exchange, torch.tensor(lens))
        for values in rows:
            assert torch.equal(split.gather(split.own(values)), values)
            assert torch.equal(split.gatherer(wanted)(split.own(values)), values[wanted])
        halves = rows[4] + 0.5
        assert torch.equal(split.gather(split.own(halves), torch.bfloat16), halves)

    if size == 1:
        work(ALONE)
    together(size, work)


def shared(model: Model, exchange: RowExchange) -> Model:
    return dataclasses.replace(model, row_exchange=exchange)
