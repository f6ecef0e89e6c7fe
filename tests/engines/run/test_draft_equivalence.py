"""Drafts change how many steps an answer takes, never a greedy token: whatever is accepted, cut, moved or preempted."""

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_world import Rank, World
from shoal.engines.config import CacheConfig, EngineConfig, Role, VerifyMode
from shoal.engines.core.request import EngineRequest, SamplingParams, TokensEvent
from shoal.engines.core.verify.curve import StepCurve
from shoal.engines.core.verify.lengths import VerifyLengths, VerifySettings
from shoal.engines.model.decoder import Model
from shoal.engines.model.drafter import DraftBlock, DraftChoice
from shoal.engines.run.bound import WholeSequence
from shoal.engines.run.curve_start import KeptCurves
from shoal.engines.run.generate import generate
from shoal.engines.run.load import build_engine, check_drafts
from shoal.engines.run.penalties import Penalties
from shoal.engines.run.plain import whole_text
from shoal.engines.run.sampler import final_logprobs, finite
from torch import Tensor

GRAIN, KEEP, DRAFTS = 16, 24, 5


class Foreteller:
    """The model's own drafter, except that where an answer is known its tokens are put forward, so far as dice say."""

    def __init__(self, drafter: object, seed: int) -> None:
        self.drafter = drafter
        self.dice = random.Random(seed)
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}

    def learn(self, request: EngineRequest, outputs: list[int]) -> None:
        for i, token in enumerate(outputs):
            self.known[request.prompt_len + i, token] = tuple(outputs[i + 1 : i + 1 + DRAFTS])

    def draft(self, golden: Tensor, positions: Tensor, slots: Tensor, choice: DraftChoice) -> DraftBlock:
        keys = zip((positions + 1).tolist(), golden.tolist(), strict=True)
        futures = [self.known.get(key, ())[: self.dice.randrange(DRAFTS + 1)] for key in keys]

        def told(logits: Tensor, number: int) -> Tensor:
            logits = logits.clone()
            for row, future in enumerate(futures):
                if number < len(future):
                    logits[row, future[number]] += 100.0
            return choice(logits, number)

        return self.drafter.draft(golden, positions, slots, told)


@pytest.fixture
def world(narrow_drafting: Model, request: pytest.FixtureRequest) -> World:
    return World(narrow_drafting, KEEP, GRAIN, seed=sum(request.node.name.encode()))


@pytest.fixture
def teller(world: World) -> Foreteller:
    return Foreteller(None, seed=world.dice.getrandbits(32))


def drafting_rank(world: World, role: Role, teller: Foreteller, **settings: object) -> Rank:
    rank = world.rank(role, drafts=DRAFTS, **settings)
    if role is not Role.PROMPT:
        drafting = rank.engine._runner._drafting
        teller.drafter, drafting._drafter = drafting._drafter, teller
    return rank


def choosing_rank(world: World, role: Role, teller: Foreteller, curve: StepCurve, **settings: object) -> Rank:
    """A rank that verifies as many drafts as pay by `curve`, and by the times of its own steps."""
    rank = drafting_rank(world, role, teller, **settings)
    sequences_max = rank.engine.config.sequences_max
    rank.engine._scheduler._verify = VerifyLengths(VerifySettings(VerifyMode.VARLEN, DRAFTS, sequences_max, curve))
    return rank


def curve_of(ms: Callable[[int], float], rows_max: int = 96) -> StepCurve:
    return StepCurve.of((rows, ms(rows)) for rows in range(1, rows_max + 1))


def teach(world: World, teller: Foreteller, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """The answers of an engine without drafts, which the plain loop confirms."""
    rank = world.rank(Role.NORMAL)
    for request in requests:
        world.submit(rank, request)
    rank.run()
    for request in requests:
        world.check(request, rank.tokens[request.request_id])
        teller.learn(request, rank.tokens[request.request_id])
    return rank.tokens


def steps_of(rank: Rank) -> tuple[int, int]:
    """Drafts verified and accepted so far."""
    verified = sum(sum(output.verified) for output in rank.outputs)
    return verified, sum(sum(output.accepted) for output in rank.outputs)


@pytest.mark.parametrize("step_tokens_max", [100, 512])
def test_any_batch_and_chunks(world: World, teller: Foreteller, step_tokens_max: int) -> None:
    """Prompts and answers that end on, before and behind block boundaries, with images."""
    shapes = [(1, (), 20), (37, (5,), 30), (64, (), 17), (47, (14,), 34), (21, (), 3)]
    requests = [world.request(f"r{i}", n, world.sampling(m, True), images) for i, (n, images, m) in enumerate(shapes)]
    answers = teach(world, teller, requests)
    rank = drafting_rank(world, Role.NORMAL, teller, step_tokens_max=step_tokens_max)
    for request in requests:
        world.submit(rank, request)
    rank.run()
    assert rank.tokens == answers
    verified, accepted = steps_of(rank)
    assert 0 < accepted < verified, "the scenario does not test what it says"


def test_fewer_verified_drafts_change_no_token(world: World, teller: Foreteller) -> None:
    """Several sequences at once, whose drafter is more or less sure; an image and a short answer among them."""
    shapes = [(20, (5,), 16), (40, (), 9), (21, (), 3)]
    requests = [world.request(f"r{i}", n, world.sampling(m, True), images) for i, (n, images, m) in enumerate(shapes)]
    answers = teach(world, teller, requests)
    counts = []
    for curve in (curve_of(lambda rows: 60 + 4 * rows), curve_of(lambda rows: 1e6 * rows**2)):
        rank = choosing_rank(world, Role.NORMAL, teller, curve)
        for request in requests:
            world.submit(rank, request)
        rank.run()
        assert rank.tokens == answers
        drafts = [output.drafts for output in rank.outputs]
        counts.append([sum(one[i] for one in drafts) for i in range(4)])
    (made, _, verified, accepted), nobody = counts
    assert 0 < accepted < verified < made, "the scenario does not test what it says"
    assert nobody[0] > 0
    assert nobody[1:] == [0, 0, 0], "a row costs more than everything that it could bring"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_accepted_and_sampled_tokens(world: World, teller: Foreteller, temperature: float) -> None:
    """Each token is reported under the distribution that the full forward has at its place, behind what was output."""
    sampling = SamplingParams(
        temperature=temperature, top_p=0.95, seed=6, max_tokens=12, ignore_eos=True, logprobs=3, presence_penalty=0.5
    )
    request = world.request("r", 45, sampling, (8,))
    teach(world, teller, [request])
    rank = drafting_rank(world, Role.NORMAL, teller)
    world.submit(rank, request)
    rank.run()
    assert steps_of(rank)[1] > 0, "no draft was accepted: the scenario does not test what it says"
    events = [e for output in rank.outputs for e in output.events if isinstance(e, TokensEvent)]
    outputs = [token for e in events for token in e.token_ids]
    reported = [one for e in events for one in e.logprobs]
    text = whole_text(request, (*request.token_ids, *outputs[:-1]), world.images, world.truncation)
    logits = WholeSequence(world.model).logits_of(text, len(outputs))
    logits = Penalties(1).apply(logits, [request] * len(outputs), lambda row: tuple(outputs[:row]))
    rows = [sampling] * len(outputs)
    table = final_logprobs(finite(logits)[0], rows, torch.tensor([temperature == 0.0] * len(outputs)))
    for row, token, one in zip(table, outputs, reported, strict=True):
        assert one.token == pytest.approx(float(row[token]), abs=1e-6)
        told = [value for _, value in one.top]
        assert told == pytest.approx(torch.topk(row, 3).values.clamp_min(-9999.0).tolist(), abs=1e-6)


def test_preempted_sequences(world: World, teller: Foreteller) -> None:
    requests = [world.request(f"r{i}", 40, world.sampling(16, True), (8,)) for i in range(3)]
    answers = teach(world, teller, requests)
    cache = dataclasses.replace(world.rank(Role.NORMAL).engine.config.cache, blocks_count=11)
    rank = drafting_rank(world, Role.NORMAL, teller, cache=cache, watermark=1.0)
    for request in requests:
        world.submit(rank, request)
    rank.run()
    prefilled = sum(output.rows for output in rank.outputs if output.kind == "prefill")
    assert prefilled > 3 * 40, "nothing was preempted: the scenario does not test what it says"
    assert rank.tokens == answers


def test_prompts_handed_to_an_engine_that_drafts(world: World, teller: Foreteller) -> None:
    """The receiver starts with pads; it saves every grain and anchor that an engine without drafts does."""
    requests = [world.request(f"r{i}", n, world.sampling(40, True)) for i, n in enumerate([15, 16, 50])]
    answers = teach(world, teller, requests)
    source, plain = drafting_rank(world, Role.PROMPT, teller), world.rank(Role.COMPLETION, saves=True)
    target = drafting_rank(world, Role.COMPLETION, teller, saves=True)
    for rank in (target, plain):
        for request in requests:
            world.submit(source, request)
        source.tokens.clear()
        source.run()
        for request in requests:
            world.hand_off(source, rank, request.request_id)
            rank.step()
        rank.run()
        for request in requests:
            assert source.tokens[request.request_id] + rank.tokens[request.request_id] == answers[request.request_id]
    assert steps_of(target)[1] > 0
    assert set(plain.grains) <= set(target.grains)
    assert set(plain.anchors) <= set(target.anchors)


def test_a_hit_on_what_a_drafting_engine_saved(world: World, teller: Foreteller) -> None:
    first = world.request("first", 40, world.sampling(40, True))
    said = teach(world, teller, [first])["first"]
    saver = drafting_rank(world, Role.NORMAL, teller, saves=True)
    world.submit(saver, first)
    saver.run()
    assert saver.tokens["first"] == said
    ids = (*first.token_ids, *said, *world.request("q", 30, first.sampling).token_ids)
    second = EngineRequest("second", ids, len(ids), world.sampling(20, True))
    answers = teach(world, teller, [second])
    other = drafting_rank(world, Role.NORMAL, teller)
    hit = dataclasses.replace(second, hit_tokens=64)
    world.submit(other, hit)
    world.load_hit(other, hit, saver, "first")
    other.run()
    assert other.tokens["second"] == answers["second"]
    assert steps_of(other)[1] > 0


def test_the_drafter_sees_the_same_whatever_was_rejected(world: World, teller: Foreteller) -> None:
    """Drafts after a step depend on the text alone: not on the batch, nor on how the text was cut into steps."""
    request = world.request("r", 30, world.sampling(12, True))
    teach(world, teller, [request])
    seen: list[dict[tuple[int, int], tuple[int, ...]]] = []
    for _ in range(2):
        made: dict[tuple[int, int], tuple[int, ...]] = {}
        rank = drafting_rank(world, Role.NORMAL, teller)
        own = teller.drafter
        others = [world.request(f"o{i}", 20 + i, world.sampling(12, True)) for i in range(len(seen))]
        for one in (request, *others):
            world.submit(rank, one)
        while rank.engine.has_work:
            rank.step()
            sequence = rank.engine._scheduler.ledger.sequences.get("r")
            if sequence is not None and sequence.has_draft_info:
                slots = torch.tensor([sequence.slot])
                block = own.draft(
                    torch.tensor(sequence.output[-1:]), torch.tensor([sequence.cached - 1]), slots, greedy
                )
                made[sequence.len, sequence.output[-1]] = tuple(block.tokens[0].tolist())
        seen.append(made)
    common = set(seen[0]) & set(seen[1])
    assert common
    assert all(seen[0][key] == seen[1][key] for key in common)


def greedy(logits: Tensor, number: int) -> Tensor:
    return logits.argmax(-1)


def test_seeded_sampling_is_repeatable_and_complete(world: World, teller: Foreteller) -> None:
    requests = [world.request(f"r{i}", 20 + i, world.sampling(10, False)) for i in range(3)]
    said = []
    for _ in range(2):
        rank = drafting_rank(world, Role.NORMAL, teller)
        rank.engine._runner._drafting._drafter = teller.drafter
        for request in requests:
            world.submit(rank, request)
        rank.run()
        said.append(dict(rank.tokens))
    assert said[0] == said[1]
    assert all(len(tokens) == 10 for tokens in said[0].values())


def test_an_engine_measures_its_own_steps(narrow_drafting: Model, tmp_path: Path) -> None:
    """At its start, or it takes what another life of it has kept; what it is told of its steps corrects the curve."""
    config = EngineConfig(
        Role.NORMAL, sequences_max=1, max_model_len=200, drafts=DRAFTS, verify=VerifyMode.VARLEN,
        cache=CacheConfig(GRAIN, 64, 4),
    )  # fmt: skip
    kept = KeptCurves(tmp_path, "narrow")
    engine, _ = build_engine(narrow_drafting, config, curves=kept)
    again, _ = build_engine(narrow_drafting, config, curves=kept)
    curve = engine._scheduler._verify.settings.curve
    assert curve.sizes == tuple(range(1, 7))
    assert list(curve.ms) == sorted(curve.ms)
    assert again._scheduler._verify.settings.curve == curve
    assert len(list(tmp_path.iterdir())) == 1
    prompt = tuple(range(40, 60))
    engine.submit(EngineRequest("r", prompt, len(prompt), SamplingParams(0.0, max_tokens=16, ignore_eos=True)), 0)
    while engine.has_work:
        engine.step(0)
    assert engine._scheduler._verify.corrections(1)[1] > 0, "no step's times came back to the chooser"


def test_a_curve_that_cannot_be_kept_is_measured_and_told(
    narrow_drafting: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shoal"), "propagate", True)  # an actor in this process may have ended it
    config = EngineConfig(
        Role.NORMAL, sequences_max=1, max_model_len=200, drafts=1, verify=VerifyMode.VARLEN,
        cache=CacheConfig(GRAIN, 64, 4),
    )  # fmt: skip
    (tmp_path / "file").write_text("not a directory")
    engine, _ = build_engine(narrow_drafting, config, curves=KeptCurves(tmp_path / "file", "narrow"))
    assert engine._scheduler._verify.settings.curve.rows_max == 2
    assert f"step curves cannot be kept in {tmp_path / 'file'}" in caplog.text


def test_generate_with_drafts(toy_dir: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    prompt = tuple(range(40, 60))
    assert list(generate(toy_dir, prompt, sampling, drafts=5)) == list(generate(toy_dir, prompt, sampling))


def test_drafts_a_model_cannot_make_are_refused(narrow: Model, narrow_drafting: Model) -> None:
    with pytest.raises(ValueError, match="drafts = 5 needs the model's drafter, which is not loaded"):
        check_drafts(narrow, EngineConfig(Role.NORMAL, drafts=5))
    with pytest.raises(ValueError, match="verify = varlen chooses among drafts and drafts = 0"):
        check_drafts(narrow_drafting, EngineConfig(Role.NORMAL, verify=VerifyMode.VARLEN))
    with pytest.raises(ValueError, match=r"drafts = 6 must lie in 0\.\.5, the block of the model's drafter"):
        check_drafts(narrow_drafting, EngineConfig(Role.NORMAL, drafts=6))
