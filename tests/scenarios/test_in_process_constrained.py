"""Constrained answers of a whole cluster in one process: hand-offs, a death in mid-answer, and a text that is none."""

import asyncio
import json
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import torch
from scenarios.in_process import running, until, without_drafts
from shoal.cluster.live.engine_build import Built, registered
from shoal.cluster.live.names import COMPLETION, role_of
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.grammar.token_bytes import TokenBytes
from shoal.engines.model.decoder import Model
from shoal.engines.run.load import build_engine, grammar_compiler, load_model
from shoal.engines.toy.build import ensure_toy
from shoal.engines.toy.tokenizer import TOKENIZER_FILE

TOKENS = TokenBytes.from_json(TOKENIZER_FILE.read_text(encoding="utf-8"))
LISTS = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 4}, "minItems": 6, "maxItems": 6}
SPEC = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(LISTS))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load_model(ensure_toy())


def build_with(model, spec, group, transfer_of):
    engine, memory = build_engine(model, without_drafts(spec.engine(role_of(group))), saves_grains=True)
    compiler = grammar_compiler(Path(spec.model_dir), model)
    return Built(engine, memory, registered(transfer_of, group, memory), {"all": "torch"}, compiler)


async def test_a_decode_engine_dies_in_mid_answer_and_the_grammar_goes_on(tmp_path, model):
    async with running(tmp_path, partial(build_with, model), seed=7) as world:
        service = await world.entrypoint()

        def jobs():
            fields = {"temperature": 1.0, "ignore_eos": False, "grammar": SPEC}
            return [world.job(n, 40 + 90 * n, 400, seed=n, **fields) for n in (1, 2)]

        calm = await asyncio.gather(*(world.ask(service, job) for job in jobs()))
        for answer in calm:
            assert (answer.error, answer.finish) == ("", "stop")
            text = b"".join(TOKENS.of(i) for i in answer.token_ids[:-1]).decode()
            jsonschema.validate(json.loads(text), LISTS)
        tasks = [asyncio.create_task(world.ask(service, job)) for job in jobs()]
        await until(lambda: decoding(world), "a decode engine at work")
        await world.renew(decoding(world)[0])
        rerouted = await asyncio.gather(*tasks)
        assert [a.token_ids for a in rerouted] == [a.token_ids for a in calm]
        assert sum(a.count("re-routed") for a in rerouted) >= 1
        await world.quiet()


async def test_a_text_that_is_no_grammar_ends_its_request_alone(tmp_path, model):
    async with running(tmp_path, partial(build_with, model), seed=8) as world:
        service = await world.entrypoint()
        bad = world.job(1, 40, 20, grammar=GrammarSpec(GrammarKind.REGEX, "("))
        good = world.job(2, 40, 20)
        refused, answered = await asyncio.gather(world.ask(service, bad), world.ask(service, good))
        assert "does not compile: Regex parsing error" in refused.error
        assert (answered.error, len(answered.token_ids)) == ("", 20)
        await world.quiet()
        counts = [engine._parts.counters() for engine in world.engines()]
        assert sum(one["grammars_failed"] for one in counts) == 1


def decoding(world):
    """Names of decode groups with a sequence that goes on; one that has ended stays until the next plan."""
    targets = (e for e in world.engines() if role_of(e._group) == COMPLETION)
    running = {e._group.name: e._parts.steps._engine._scheduler.ledger.running for e in targets}
    return [name for name, sequences in running.items() if any(not one.is_finished for one in sequences)]
