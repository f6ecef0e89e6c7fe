"""Which grammar a request's answers get, and bad schemas refused by name before anything is queued."""

import json

import jsonschema
import pytest
from api_world import CODEC, ids_of
from shoal.cluster.api.body import parse_body
from shoal.cluster.api.errors import BadRequestError
from shoal.cluster.api.settings import ApiSettings
from shoal.engines.core.grammar.matcher import Matcher
from shoal.engines.core.grammar.schema import unenforced
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.grammar.compiler import DSML, GrammarCompiler

SETTINGS = ApiSettings(context_tokens=4096)
VOCABULARY = 2048
COMPILER = GrammarCompiler(CODEC.tokens, VOCABULARY, CODEC.eos_token_id)
DSML_ID = next(i for i, spelling in CODEC.tokens.special.items() if spelling == DSML)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}


def grammar(thinking: bool = False, **fields: object) -> GrammarSpec | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "give json"}], **fields}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    return CODEC.encode(parse_body(json.dumps(body).encode(), SETTINGS), SETTINGS).grammar


def refusal(**fields: object) -> BadRequestError:
    with pytest.raises(BadRequestError) as error:
        grammar(**fields)
    assert error.value.status == 400
    return error.value


def token_ids(text: str) -> list[int]:
    """A text's tokens, with the mark of tool calls as the one token that it is."""
    parts = [ids_of(part) for part in text.split(DSML)]
    return [token for i, part in enumerate(parts) for token in ([DSML_ID] if i else []) + part]


def takes(spec: GrammarSpec, text: str) -> bool:
    """Whether a whole answer of this text is allowed."""
    matcher = Matcher(COMPILER.compile(spec), spec, CODEC.eos_token_id, VOCABULARY)
    return matcher.follow([*token_ids(text), CODEC.eos_token_id])


def call(name: str, arguments: dict[str, int]) -> str:
    lines = [f'<{DSML} parameter name="{k}" string="false">{v}</{DSML} parameter>\n' for k, v in arguments.items()]
    return f'<{DSML} invoke name="{name}">\n{"".join(lines)}</{DSML} invoke>\n'


BEGIN, END = f"\n\n<{DSML} calls>\n", f"</{DSML} calls>"


def test_plain_requests_have_none():
    assert grammar() is None
    assert grammar(response_format={"type": "text"}) is None
    assert grammar(tools=[TOOL]) is None
    assert grammar(tools=[STRICT], tool_choice="none") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_schema_by_any_name(fields):
    spec = grammar(**fields)
    assert takes(spec, '{"a": 3}')
    assert takes(spec, '{\n  "a": 3\n}')
    assert not takes(spec, '{"a": "x"}')
    assert not takes(spec, 'Sure: {"a": 3}')


def test_other_forms():
    assert takes(grammar(response_format={"type": "json_object"}), '{"x": [1, {"y": null}]}')
    assert not takes(grammar(response_format={"type": "json_object"}), "[1]")
    assert takes(grammar(guided_regex="[ab]+"), "abba")
    assert not takes(grammar(structured_outputs={"regex": "[ab]+"}), "abc")
    choice = grammar(guided_choice=["yes", 'say "no"'])
    assert takes(choice, 'say "no"')
    assert not takes(choice, "no")
    assert takes(grammar(structured_outputs={"grammar": 'root ::= "a" [0-9]'}), "a7")


def test_the_schema_is_shown_to_the_model():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format": {
        "type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}}  # fmt: skip
    prompt = CODEC.encode(parse_body(json.dumps(body).encode(), SETTINGS), SETTINGS)
    text = b"".join(CODEC.tokens.of(i) for i in prompt.token_ids).decode()
    assert json.dumps(SCHEMA) in text


def test_thoughts_are_free_and_must_come_to_an_end():
    spec = grammar(thinking=True, guided_json=SCHEMA)
    assert CODEC.tokens.special[spec.trigger_token_ids[0]] == "</think>"
    matcher = Matcher(COMPILER.compile(spec), spec, CODEC.eos_token_id, VOCABULARY)
    assert matcher.follow(ids_of("Let me see: {"))
    assert not matcher.accept(CODEC.eos_token_id)
    assert matcher.follow([*spec.trigger_token_ids, *ids_of('{"a":1}'), CODEC.eos_token_id])


def test_required_calls():
    """The prompt has begun the block: the answer goes on with a call, and ends with the block."""
    spec = grammar(tools=[TOOL, OTHER], tool_choice="required")
    assert takes(spec, call("look", {"a": 3}) + END)
    assert takes(spec, call("look", {"a": 3}) + call("wait", {}) + END)
    assert not takes(spec, END)
    assert not takes(spec, call("look", {"b": 3}) + END)
    assert not takes(spec, call("jump", {}) + END)
    assert not takes(spec, "No.")
    single = grammar(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert takes(single, call("look", {"a": 3}) + END)
    assert not takes(single, call("look", {"a": 3}) * 2 + END)


def test_a_named_call():
    spec = grammar(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "wait"}})
    assert takes(spec, call("wait", {}) + END)
    assert not takes(spec, call("look", {"a": 3}) + END)


@pytest.mark.parametrize("thinking", [False, True])
def test_strict_tools_leave_the_text_free(thinking):
    spec = grammar(thinking, tools=[STRICT])
    start = "Well.</think>" if thinking else ""
    if thinking:
        assert spec.trigger_token_ids
        spec = GrammarSpec(spec.kind, spec.text)
        start = ""
    assert takes(spec, start + "Hello < there.")
    assert takes(spec, start + "I look." + BEGIN + call("look", {"a": 3}) + END)
    assert not takes(spec, start + BEGIN + call("look", {"a": 3}) + END + "more")
    assert not takes(spec, start + BEGIN + call("look", {"b": 3}) + END)


def test_json_or_a_call():
    spec = grammar(tools=[TOOL], response_format={"type": "json_object"})
    assert takes(spec, '{"x": 1}')
    assert takes(spec, BEGIN + call("look", {"a": 3}) + END)
    assert not takes(spec, "Hello")


BAD = [
    ({"response_format": {"type": "xml"}}, "messages", ""),
    ({"response_format": {"type": "json_schema"}}, "messages", ""),
    ({"guided_json": {"type": "integr"}}, "guided_json", 'Unsupported type "integr"'),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json", "parenthesis is not closed"),
    ({"guided_json": {"$ref": "#/x"}}, "guided_json", "Cannot find field 'x'"),
    ({"guided_json": {"type": "integer", "multipleOf": 3}}, "guided_json.multipleOf", "not enforced"),
    ({"structured_outputs": {"json": {"type": "array", "items": {"not": {}}}}},
     "structured_outputs.json.items.not", "not enforced"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "Lookahead is not supported"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_choice": []}, "guided_choice", "1 to 256"),
    ({"guided_grammar": "root = 1"}, "guided_grammar", "no ebnf grammar"),
    ({"guided_grammar": "x" * 70_000}, "guided_grammar", "limit of 65536 bytes"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark", "is unknown"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined with guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "must be false"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex", "tool_choice to none"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_json": SCHEMA}, "guided_json", "leave one out"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string", "pattern": "("}}}],
      "tool_choice": "required"}, "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "rule"), BAD, ids=range(len(BAD)))
def test_bad_forms_are_refused_by_name(fields, param, rule):
    error = refusal(**fields)
    assert rule in error.message
    if param:
        assert error.param == param, error.message
    assert "/project/" not in error.message


def test_a_deep_schema_is_refused_and_not_compiled():
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    assert "32" in refusal(guided_json=schema).message
    assert "nested" in refusal(response_format={"type": "json_schema", "json_schema": {"schema": schema}}).message


# A schema, an answer that breaks it: either the keyword is named as not enforced, or the grammar does not allow it.
BREAKING = [
    ({"type": "object", "additionalProperties": True, "minProperties": 1}, "{}"),
    ({"type": "object", "additionalProperties": True, "maxProperties": 1}, '{"a":1,"b":2}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, '{"a":"x"}'),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, '{"b":1}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a":"b"}'),
    ({"type": "object", "required": ["q"]}, "{}"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "{}"),
    ({"type": "array", "contains": {"type": "integer"}}, '["a"]'),
    ({"type": "array", "uniqueItems": True}, "[1,1]"),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, '["a"]'),
    ({"type": "array", "minItems": 2, "items": {"type": "integer"}}, "[1]"),
    ({"type": "array", "maxItems": 1, "items": {"type": "integer"}}, "[1,2]"),
    ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 0}]}, "3"),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "3"),
    ({"allOf": [{"type": "integer", "minimum": 5}]}, "3"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 4}, "1"),
    ({"not": {"type": "integer"}}, "1"),
    ({"minimum": 3}, "2"),
    ({"type": "integer", "minimum": 3}, "2"),
    ({"type": "integer", "exclusiveMaximum": 3}, "3"),
    ({"type": "number", "maximum": 10}, "10.5"),
    ({"type": "number", "multipleOf": 2}, "3"),
    ({"type": ["string", "null"], "minLength": 2}, '"a"'),
    ({"type": "string", "maxLength": 2}, '"abc"'),
    ({"type": "string", "minLength": 2, "pattern": "^a+$"}, '"a"'),
    ({"type": "string", "pattern": "a(?=b)"}, '"ac"'),
    ({"type": "string", "pattern": "^[0-9]$"}, '"x"'),
    ({"type": "string", "format": "date"}, '"x"'),
    ({"type": "string", "enum": ["a", "b"]}, '"c"'),
    ({"const": {"a": 1}}, '{"a":2}'),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x", "minimum": 5}}, "$defs": {"x": {"type": "integer"}},
      "required": ["a"]}, '{"a":1}'),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1}'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "answer"), BREAKING, ids=range(len(BREAKING)))
def test_what_breaks_a_schema_is_not_allowed_or_its_keyword_is_named(schema, answer):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    assert not jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(answer))
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert unenforced(schema) is not None or not takes(spec, answer)
