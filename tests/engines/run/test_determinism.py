"""What `determinism` promises: the same bits whatever the batch and chunks, and draws that drafts do not change."""

import dataclasses
import random

import pytest
import torch
from engine_world import Rank, World
from shoal.engines.config import Determinism, Role
from shoal.engines.core.request import EngineRequest, SamplingParams
from shoal.engines.model.decoder import Model
from shoal.engines.model.numerics import Mode, Numerics, product
from shoal.engines.run import runner
from shoal.engines.run.acceptance import FRESH, judge_by_draw
from shoal.engines.run.sampler import sample
from test_draft_equivalence import Foreteller, drafting_rank, steps_of, teach

GRAIN, KEEP, DRAFTS = 16, 24, 5
FULL = Determinism.FULL
Logits = dict[tuple[str, int], torch.Tensor]


class AnyRows:
    """Verifies as many drafts of each sequence as dice say, as choosing by load or by confidence would."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def choose(self, sequences):
        return [self.dice.randint(1, 1 + len(one.drafts)) for one in sequences]


@pytest.fixture
def world(narrow_drafting: Model, request: pytest.FixtureRequest) -> World:
    return World(narrow_drafting, KEEP, GRAIN, seed=sum(request.node.name.encode()))


@pytest.fixture
def teller(world: World) -> Foreteller:
    return Foreteller(None, seed=world.dice.getrandbits(32))


def drawn(world: World, count: int) -> SamplingParams:
    """Sampled, penalties now and then."""
    return world.sampling(count, greedy=False)


def full_rank(world: World, role: Role, teller: Foreteller, **settings: object) -> Rank:
    """An engine that promises everything and verifies any number of its drafts."""
    rank = drafting_rank(world, role, teller, determinism=FULL, **settings)
    if role is not Role.PROMPT:
        rank.engine._scheduler._verify = AnyRows(world.dice.getrandbits(32))
    return rank


# ------------------------------------------------------------ bits of logits


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Logits by (request, position) of every token that is sampled in this process."""
    noted: Logits = {}
    sampled = runner.sampled_result

    def noting(items, complete, logits, refused=()):
        for row, index in enumerate(complete):
            noted[items[index].request_id, items[index].end] = logits[row].clone()
        return sampled(items, complete, logits, refused)

    monkeypatch.setattr(runner, "sampled_result", noting)
    return noted


def logits_of(world: World, seen: Logits, requests: list[EngineRequest], pauses: int, **settings: object) -> Logits:
    """What a NORMAL engine computes that gets a request every `pauses` steps."""
    rank = world.rank(Role.NORMAL, **settings)
    for request in requests:
        world.submit(rank, request)
        for _ in range(pauses):
            rank.step()
    rank.run()
    return taken(seen)


def taken(seen: Logits) -> Logits:
    """All that was noted since the last call."""
    noted = dict(seen)
    seen.clear()
    return noted


def different(one: Logits, other: Logits) -> int:
    """How many positions have other bits."""
    assert one.keys() == other.keys()
    return sum(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_have_the_same_bits_in_any_batch_and_chunks(world: World, seen: Logits, temperature: float) -> None:
    """All at once; shuffled in chunks of 23 rows; and one behind the other, in chunks of 16 of another engine."""
    shapes = [(1, ()), (37, (5,)), (64, ()), (90, (14, 60)), (21, ()), (50, ())]
    params = [SamplingParams(temperature, seed=i, max_tokens=8, ignore_eos=True) for i in range(len(shapes))]
    requests = [world.request(f"r{i}", n, params[i], images) for i, (n, images) in enumerate(shapes)]
    together = logits_of(world, seen, requests, 0, step_tokens_max=512)
    assert len(together) == 8 * len(requests)
    world.dice.shuffle(requests)
    assert not different(together, logits_of(world, seen, requests, 2, step_tokens_max=23))
    assert not different(together, logits_of(world, seen, requests, 12, step_tokens_max=16))


def test_logits_have_the_same_bits_behind_a_hand_off_a_hit_and_a_preemption(world: World, seen: Logits) -> None:
    params = SamplingParams(1.0, seed=3, max_tokens=16, ignore_eos=True)
    requests = [world.request(f"r{i}", 60, params, (8,), checkpoints=(32,)) for i in range(3)]
    together = logits_of(world, seen, requests, 0)
    source, target = world.rank(Role.PROMPT, step_tokens_max=25, saves=True), world.rank(Role.COMPLETION)
    for request in requests:
        world.submit(source, request)
    source.run()
    for request in requests:
        world.hand_off(source, target, request.request_id)
        target.step()
    target.run()
    assert not different(together, taken(seen))
    hit = dataclasses.replace(requests[0], hit_tokens=32, checkpoints=())
    other = world.rank(Role.NORMAL)
    world.submit(other, hit)
    world.load_hit(other, hit, source, "r0")
    other.run()
    assert not different({key: one for key, one in together.items() if key[0] == "r0"}, taken(seen))
    cache = dataclasses.replace(other.engine.config.cache, blocks_count=14)
    preempting = world.rank(Role.NORMAL, cache=cache, watermark=1.0)
    for request in requests:
        world.submit(preempting, request)
    preempting.run()
    assert sum(output.rows for output in preempting.outputs) > 3 * (60 + 15), "nothing was preempted"
    assert not different(together, taken(seen))


def test_the_comparison_of_bits_sees_sums_that_are_made_in_another_order(narrow_of, seen: Logits) -> None:
    """With float32 sums a day like those differs: equal bits above are no accident of the comparison."""
    rough = narrow_of(dataclasses.replace(Numerics.of(Mode.N1), wide=torch.float32))
    world = World(dataclasses.replace(rough, drafter=None), KEEP, GRAIN, seed=1)
    params = SamplingParams(0.0, max_tokens=4, ignore_eos=True)
    requests = [world.request(f"r{i}", 40 + 9 * i, params) for i in range(4)]
    together = logits_of(world, seen, requests, 0, step_tokens_max=512)
    assert different(together, logits_of(world, seen, requests, 6, step_tokens_max=16))


@pytest.mark.parametrize("columns", [24, 64, 512])
def test_a_product_of_bf16_numbers_has_the_same_bits_for_any_rows(columns: int) -> None:
    """Its sums are exact in float64: 16 bits a product, 9 for the sum, and 28 binary orders of magnitude to spare."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(96, columns, generator=generator).to(torch.bfloat16)
    x = Numerics.of(Mode.N1).round(torch.randn(200, columns, generator=generator).double())
    whole = product(x, weight)
    order = torch.randperm(columns, generator=generator)
    assert torch.equal(whole, product(x[:, order], weight[:, order])), "not exact: the order of a sum shows"
    for height in (1, 2, 3, 7, 16, 65):
        assert torch.equal(whole, torch.cat([product(part, weight) for part in x.split(height)]))


# ------------------------------------------------------------ draws with drafts


def test_a_row_judged_by_its_draw_outputs_what_the_sampler_draws() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(300, 40, generator=generator) * 3
    params = [SamplingParams(temperature=(0.0, 0.8, 1.2)[i % 3], seed=i, top_p=0.95) for i in range(300)]
    drafts = torch.randint(FRESH, 40, (300,), generator=generator)
    wanted = [one.token_id for one in sample(logits, params, range(300))]
    drafts[::4] = torch.tensor(wanted)[::4]
    judged = judge_by_draw(logits, params, range(300), drafts)
    assert judged.tokens.tolist() == wanted
    assert judged.accepted.tolist() == [a == b for a, b in zip(drafts.tolist(), wanted, strict=True)]
    assert 75 <= int(judged.accepted.sum()) < 150


@pytest.mark.parametrize("step_tokens_max", [100, 512])
def test_full_gives_the_plain_loops_draws_whatever_is_drafted(
    world: World, teller: Foreteller, step_tokens_max: int
) -> None:
    """Shuffled, in chunks, with images and penalties; any number of drafts is verified, right or wrong."""
    shapes = [(1, (), 20), (37, (5,), 30), (64, (), 17), (47, (14,), 34), (21, (), 3)]
    requests = [world.request(f"r{i}", n, drawn(world, m), images) for i, (n, images, m) in enumerate(shapes)]
    answers = teach(world, teller, requests)
    world.dice.shuffle(requests)
    rank = full_rank(world, Role.NORMAL, teller, step_tokens_max=step_tokens_max)
    for request in requests:
        world.submit(rank, request)
        rank.step()
    rank.run()
    assert rank.tokens == answers
    verified, accepted = steps_of(rank)
    assert 0 < accepted < verified, "the scenario does not test what it says"


def test_without_full_drafts_change_draws(world: World, teller: Foreteller) -> None:
    """What `full` is for: the same day by the ratio of the two distributions gives other, equally likely, tokens."""
    requests = [world.request(f"r{i}", 20 + i, drawn(world, 20)) for i in range(4)]
    answers = teach(world, teller, requests)
    rank = drafting_rank(world, Role.NORMAL, teller)
    for request in requests:
        world.submit(rank, request)
    rank.run()
    assert rank.tokens != answers


def test_full_holds_through_hand_off_hit_and_a_lost_engine(world: World, teller: Foreteller) -> None:
    """Prefilled here, decoded there, lost after some tokens, continued elsewhere from what the store has."""
    first = world.request("r", 70, drawn(world, 24), checkpoints=(32, 64))
    [whole] = teach(world, teller, [first]).values()
    source = full_rank(world, Role.PROMPT, teller, step_tokens_max=31, saves=True)
    target = full_rank(world, Role.COMPLETION, teller)
    world.submit(source, first)
    source.run()
    world.hand_off(source, target, "r")
    while len(target.tokens.get("r", ())) < 7:
        target.step()
    said = source.tokens["r"] + target.tokens["r"]
    assert said == whole[: len(said)]
    again = dataclasses.replace(first, token_ids=(*first.token_ids, *said), hit_tokens=32, checkpoints=())
    other = full_rank(world, Role.NORMAL, teller, sequences_max=4, step_tokens_max=40)
    world.submit(other, again)
    world.load_hit(other, again, source, "r")
    other.run()
    assert said + other.tokens["r"] == whole
    assert steps_of(other)[0] > 0


def test_full_holds_for_preempted_sequences(world: World, teller: Foreteller) -> None:
    requests = [world.request(f"r{i}", 40, drawn(world, 16), (8,)) for i in range(3)]
    answers = teach(world, teller, requests)
    cache = dataclasses.replace(world.rank(Role.NORMAL).engine.config.cache, blocks_count=11)
    rank = full_rank(world, Role.NORMAL, teller, cache=cache, watermark=1.0)
    for request in requests:
        world.submit(rank, request)
    rank.run()
    prefilled = sum(output.rows for output in rank.outputs if output.kind == "prefill")
    assert prefilled > 3 * 40, "nothing was preempted: the scenario does not test what it says"
    assert rank.tokens == answers
