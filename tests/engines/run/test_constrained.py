"""Constrained output over real grammars: valid whatever the weights say, and the same wherever it is computed."""

import json
import re
from dataclasses import replace
from functools import cache

import jsonschema
import pytest
from engine_world import Rank, World
from shoal.engines.config import Role
from shoal.engines.core.grammar.matcher import Grammar, GrammarError
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.core.plan import Reservation
from shoal.engines.core.request import EngineRequest, FinishReason, Rejected, SamplingParams
from shoal.engines.grammar.compiler import DSML, GrammarCompiler
from shoal.engines.grammar.token_bytes import TokenBytes
from shoal.engines.model.decoder import Model
from shoal.engines.toy.tokenizer import EOS, TOKENIZER_FILE

TOKENS = TokenBytes.from_json(TOKENIZER_FILE.read_text(encoding="utf-8"))
EOS_ID, THINK_END = (next(i for i, s in TOKENS.special.items() if s == name) for name in (EOS, "</think>"))
VOCABULARY = 2048
SCHEMAS = [
    {
        "type": "object",
        "properties": {"room": {"enum": ["library", "hall"]}, "hour": {"type": "integer", "minimum": 0, "maximum": 24}},
        "required": ["room", "hour"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": 7}]},
    {
        "type": "object",
        "properties": {"when": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}, "next": {"$ref": "#/$defs/leaf"}},
        "required": ["when"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}},
    },
]


@cache
def compiler() -> GrammarCompiler:
    """Little white space is allowed, of which random weights would write much."""
    return GrammarCompiler(TOKENS, VOCABULARY, EOS_ID, whitespace_max=1)


def json_spec(schema: dict, **fields: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), **fields)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS_ID, "not complete"
    return b"".join(TOKENS.of(i) for i in tokens[:-1]).decode()


def sampled(seed: int, tokens: int = 120, **fields: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": tokens} | fields))


@pytest.fixture
def world(narrow: Model, request: pytest.FixtureRequest) -> World:
    """Random weights: whatever is right comes from the mask alone."""
    return World(narrow, 24, 16, seed=sum(request.node.name.encode()))


def ready(rank: Rank, request: EngineRequest) -> None:
    assert request.grammar is not None
    assert rank.engine.grammar_ready(request.request_id, compiler().compile(request.grammar))


def answers(rank: Rank, requests: list[EngineRequest]) -> list[list[int]]:
    rank.run()
    return [rank.tokens[r.request_id] for r in requests]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_every_answer_of_random_weights_is_valid(world: World, number: int) -> None:
    schema = SCHEMAS[number]
    rank = world.rank(Role.NORMAL, sequences_max=4)
    requests = [
        world.request(f"r{seed}", 20, sampled(seed, temperature=1.0 if seed else 0.0), grammar=json_spec(schema))
        for seed in range(4)
    ]
    for request in requests:
        world.submit(rank, request)
        ready(rank, request)
    for request, tokens in zip(requests, answers(rank, requests), strict=True):
        assert rank.finished[request.request_id].reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(tokens)), schema)
    assert len({tuple(rank.tokens[r.request_id]) for r in requests}) > 1, "all alike: nothing was sampled"


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        (GrammarKind.REGEX, "[a-c]{2,5}-[0-9]{3}", r"[a-c]{2,5}-[0-9]{3}"),
        (GrammarKind.EBNF, 'root ::= ("yes" | "no") " " [!?]', r"(yes|no) [!?]"),
    ],
)
def test_other_kinds(world: World, kind: GrammarKind, text: str, rule: str) -> None:
    rank = world.rank(Role.NORMAL)
    requests = [world.request(f"r{seed}", 12, sampled(seed), grammar=GrammarSpec(kind, text)) for seed in range(4)]
    for request in requests:
        world.submit(rank, request)
        ready(rank, request)
    for tokens in answers(rank, requests):
        assert re.fullmatch(rule, text_of(tokens))


def test_the_grammar_begins_behind_its_trigger(world: World) -> None:
    """Free thoughts that cannot end the answer, then JSON alone. Random weights think for long, so they are told to
    stop: the end mark is the 24th output, by the bound token of the thoughts before."""
    rank = world.rank(Role.NORMAL)
    free = world.request("free", 12, sampled(3, 40, ignore_eos=True))
    world.submit(rank, free)
    rank.run()
    thoughts = rank.tokens["free"]
    bound = thoughts[23]
    spec = json_spec(SCHEMAS[0], trigger_token_ids=(THINK_END,), bound_token_id=bound)
    request = replace(free, request_id="bound", grammar=spec, sampling=sampled(3))
    world.submit(rank, request)
    ready(rank, request)
    rank.run()
    tokens = rank.tokens["bound"]
    cut = thoughts.index(bound) + 1
    assert tokens[:cut] == thoughts[:cut], "thoughts were not free"
    assert tokens[cut] == THINK_END
    jsonschema.validate(json.loads(text_of(tokens[cut + 1 :])), SCHEMAS[0])


def test_plain_rows_of_a_mixed_batch_are_untouched(world: World) -> None:
    """The same tokens as without constrained companions, and those of the plain loop."""
    rank = world.rank(Role.NORMAL, step_tokens_max=40)
    plain = [world.request(f"p{i}", 25 + 10 * i, world.sampling(12)) for i in range(3)]
    bound = [world.request(f"c{i}", 20, sampled(i, 60), grammar=json_spec(SCHEMAS[i])) for i in range(3)]
    for one, other in zip(plain, bound, strict=True):
        world.submit(rank, one)
        world.submit(rank, other)
        ready(rank, other)
    rank.run()
    for request in plain:
        world.check(request, rank.tokens[request.request_id])


def test_it_waits_for_its_grammar_while_others_run(world: World) -> None:
    rank = world.rank(Role.NORMAL)
    late = world.request("late", 20, sampled(1), grammar=json_spec(SCHEMAS[2]))
    world.submit(rank, late)
    other = world.request("other", 20, world.sampling(5))
    world.submit(rank, other)
    rank.run()
    assert len(rank.tokens["other"]) == 5
    assert "late" not in rank.tokens
    assert not rank.engine.has_work, "an engine must sleep while a request waits for its grammar"
    ready(rank, late)
    rank.run()
    assert rank.finished["late"].reason is FinishReason.STOP


def test_a_refused_and_an_aborted_waiting_request_end_and_leave_nothing(world: World) -> None:
    rank = world.rank(Role.NORMAL)
    for name in ("bad", "gone"):
        world.submit(rank, world.request(name, 20, sampled(1), grammar=json_spec(SCHEMAS[0])))
    rank.engine.refuse("bad", "the grammar does not compile: x")
    rank.engine.abort("gone")
    rank.run()
    assert rank.finished["bad"].reason is FinishReason.REFUSED
    assert rank.finished["bad"].detail == "the grammar does not compile: x"
    assert rank.finished["gone"].reason is FinishReason.ABORT
    assert rank.engine.capacity().blocks_free == rank.engine.capacity().blocks_count
    assert not rank.engine.grammar_ready("gone", compiler().compile(json_spec(SCHEMAS[0])))


def reference(world: World, request: EngineRequest) -> list[int]:
    """The answer of one undisturbed engine."""
    rank = world.rank(Role.NORMAL)
    world.submit(rank, request)
    ready(rank, request)
    rank.run()
    return rank.tokens[request.request_id]


LISTS = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 4}, "minItems": 6, "maxItems": 6}


def test_a_preempted_answer_is_computed_again_to_the_same_tokens(world: World) -> None:
    cache = replace(world.rank(Role.NORMAL).engine.config.cache, blocks_count=10)
    rank = world.rank(Role.NORMAL, cache=cache, watermark=1.0)
    requests = [world.request(f"r{i}", 40, sampled(i, 40), grammar=json_spec(LISTS)) for i in range(3)]
    for request in requests:
        world.submit(rank, request)
        ready(rank, request)
    rank.run()
    needed = sum(40 + len(rank.tokens[r.request_id]) - 1 for r in requests)
    assert sum(output.rows for output in rank.outputs) > needed, "nothing was preempted and computed again"
    for request in requests:
        assert rank.finished[request.request_id].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert rank.tokens[request.request_id] == reference(world, request)


def test_handed_off_and_moved_answers_go_on_in_their_grammar(world: World) -> None:
    """P to D after the first token; then, from some tokens on, as a new prompt at a third engine."""
    request = world.request("r", 37, sampled(5), grammar=json_spec(LISTS))
    wanted = reference(world, request)
    source, target = world.rank(Role.PROMPT), world.rank(Role.COMPLETION)
    world.submit(source, request)
    ready(source, request)
    source.run()
    state = source.prompts["r"].state
    room = target.engine.reserve("r", len(state.token_ids), now_us=0)
    assert isinstance(room, Reservation)
    there = room.blocks[: len(source.prompts["r"].blocks)]
    target.memory.blocks[list(there)] = source.memory.blocks[list(source.prompts["r"].blocks)]
    target.memory.slots[room.slot] = source.memory.slots[source.prompts["r"].slot]
    assert isinstance(target.engine.admit(room, state, now_us=0), Rejected), "admitted without its grammar"
    target.engine.admit(room, state, now_us=0, grammar=compiler().compile(request.grammar))
    target.first["r"] = 1
    for _ in range(7):
        target.step()
    moved = source.tokens["r"] + target.tokens["r"]
    assert moved == wanted[: len(moved)]
    third = world.rank(Role.NORMAL)
    again = replace(request, token_ids=request.token_ids + tuple(moved))
    world.submit(third, again)
    ready(third, again)
    third.run()
    assert moved + third.tokens["r"] == wanted
    jsonschema.validate(json.loads(text_of(wanted)), LISTS)


class Breaking:
    """A grammar that allows everything and breaks at its third token, or refuses it."""

    def __init__(self, raises: bool) -> None:
        self._inner: Grammar = compiler().compile(GrammarSpec(GrammarKind.REGEX, ".*"))
        self._raises, self._count = raises, 0

    def accept(self, token_id: int) -> bool:
        self._count += 1
        if self._count == 3 and self._raises:
            raise GrammarError("internal")
        return self._count != 3 and self._inner.accept(token_id)

    def rollback(self, tokens: int) -> None:
        self._inner.rollback(tokens)

    def allowed(self):
        return self._inner.allowed()


@pytest.mark.parametrize("raises", [False, True])
def test_a_failing_matcher_ends_its_request_alone(world: World, raises: bool) -> None:
    rank = world.rank(Role.NORMAL)
    plain = world.request("plain", 20, world.sampling(8))
    broken = world.request("broken", 20, sampled(1, 50), grammar=GrammarSpec(GrammarKind.REGEX, ".*"))
    for request in (plain, broken):
        world.submit(rank, request)
    rank.engine.grammar_ready("broken", Breaking(raises))
    rank.run()
    world.check(plain, rank.tokens["plain"])
    end = rank.finished["broken"]
    assert end.reason is FinishReason.ERROR
    assert "output token 2" in end.detail
    assert end.output_tokens == len(rank.tokens["broken"]) == 3, "a token was pushed that nobody saw"


def test_text_that_is_no_grammar_is_told_without_file_names() -> None:
    with pytest.raises(GrammarError, match=r'^Unsupported type "integr"$'):
        compiler().compile(json_spec({"type": "integr"}))


def test_only_tool_calls_may_hold_the_token_that_marks_them() -> None:
    dsml = next(i for i, s in TOKENS.special.items() if s == DSML)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": f"a{DSML}b"}}
    marked = compiler().compile(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    assert marked.accept(TOKENS.pieces.index(b"a"))
    assert marked.accept(dsml)
    plain = compiler().compile(GrammarSpec(GrammarKind.REGEX, ".*"))
    assert not plain.accept(dsml)
