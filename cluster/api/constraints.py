"""What form an answer must have: response_format, vLLM's guided fields and tool_choice, as one grammar or a refusal."""

import json
from dataclasses import dataclass
from typing import Any

from shoal.cluster.api.body import ChatBody
from shoal.cluster.api.errors import BadRequestError
from shoal.cluster.api.tool_calls import Format, json_or_block, rest_of_block, text_with_block
from shoal.engines.core.grammar.schema import DEPTH_MAX, depth, unenforced
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.grammar.compiler import objection

TEXT_BYTES_MAX = 64 << 10
CHOICES_MAX = 256
ANY_OBJECT = {"type": "object"}
# vLLM's fields: (old name, name inside `structured_outputs`)
GUIDED = (
    ("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar"),
    ("guided_json_object", "json_object"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """One field's wish: a schema is kept as a value, too. `param` is the field's path."""

    param: str
    kind: GrammarKind
    text: str = ""
    schema: object = None


def grammar_of(body: ChatBody, thinking_end: int | None) -> GrammarSpec | None:
    """The grammar of a checked request's answers, None if they are free; parsed, not yet compiled for a tokenizer.

    `thinking_end` is the token behind which the answer begins, when the model is to think first. Raises
    BadRequestError naming field, rule and remedy. May take seconds, the first time in a process.
    """
    form, trigger = asked_form(body), () if thinking_end is None else (thinking_end,)
    tools = _asked_tools(body)
    if form is None and tools is None:
        return None
    if body.ignore_eos:
        raise _refuse("ignore_eos", "must be false where the answer has a form: EOS ends it")
    if tools is None:
        assert form is not None, "neither form nor tools"
        return _parsed(GrammarSpec(form.kind, form.text, trigger), form.param)
    tag = json.dumps({"type": "structural_tag", "format": _tools_format(body, form, tools)})
    return _parsed(GrammarSpec(GrammarKind.STRUCTURAL_TAG, tag, trigger), "tools")


def asked_form(body: ChatBody) -> Form | None:
    """The form that response_format or a guided field asks for. Raises BadRequestError, also when several do."""
    forms = [form for form in (_of_response_format(body.response_format), *_guided(body)) if form is not None]
    if len(forms) > 1:
        raise _refuse(forms[1].param, f"cannot be combined with {forms[0].param}; leave one out")
    return forms[0] if forms else None


# ---------------------------------------------------------------- forms


def _of_response_format(value: dict[str, Any] | None) -> Form | None:
    match (value or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return Form("response_format", GrammarKind.JSON_OBJECT, schema=ANY_OBJECT)
        case "json_schema":
            asked = (value or {}).get("json_schema")
            if not isinstance(asked, dict) or not isinstance(asked.get("schema"), dict):
                raise _refuse("response_format.json_schema", 'must be an object {"name": ..., "schema": {...}}')
            return _of_schema("response_format.json_schema.schema", asked["schema"], bool(asked.get("strict")))
    raise _refuse("response_format.type", "must be text, json_object or json_schema")


def _guided(body: ChatBody) -> list[Form | None]:
    """The forms of vLLM's fields."""
    inner = body.structured_outputs or {}
    unknown = sorted(inner.keys() - {name for _, name in GUIDED})
    if unknown:
        raise _refuse(f"structured_outputs.{unknown[0]}", "is unknown; use json, regex, choice, grammar or json_object")
    wishes = [(f"structured_outputs.{name}", name, inner.get(name)) for _, name in GUIDED]
    wishes += [(field, name, getattr(body, field)) for field, name in GUIDED]
    return [_of_guided(param, name, value) for param, name, value in wishes if value not in (None, False)]


def _of_guided(param: str, name: str, value: Any) -> Form:
    if name == "json_object":
        return Form(param, GrammarKind.JSON_OBJECT, schema=ANY_OBJECT)
    if name == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise _refuse(param, f"is not JSON: {error}") from error
        return _of_schema(param, value, is_strict=True)
    if name == "choice":
        is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        if not is_list or not 0 < len(value) <= CHOICES_MAX:
            raise _refuse(param, f"must be a list of 1 to {CHOICES_MAX} texts that are not empty")
        options = " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
        return Form(param, GrammarKind.EBNF, _short(param, f"root ::= {options}"))
    if not isinstance(value, str) or not value:
        raise _refuse(param, "must be text that is not empty")
    kind = GrammarKind.REGEX if name == "regex" else GrammarKind.EBNF
    return Form(param, kind, _short(param, value))


def _of_schema(param: str, schema: object, is_strict: bool) -> Form:
    """A schema's form; a strict one holds nothing that a grammar would not enforce."""
    if not isinstance(schema, dict):
        raise _refuse(param, "must be a JSON schema, an object")
    if depth(schema) > 2 * DEPTH_MAX:
        raise _refuse(param, f"is nested more than {DEPTH_MAX} schemas deep; flatten it or use $ref")
    text = _short(param, json.dumps(schema))
    if is_strict and (fault := unenforced(schema)) is not None:
        raise _refuse(f"{param}.{fault.path}" if fault.path else param, fault.rule)
    return Form(param, GrammarKind.JSON_SCHEMA, text, schema)


def _short(param: str, text: str) -> str:
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise _refuse(param, f"is over the limit of {TEXT_BYTES_MAX} bytes; ask for a smaller one")
    return text


# ---------------------------------------------------------------- tools


def _asked_tools(body: ChatBody) -> list[Format] | None:
    """Name and parameters of the tools that the answer's grammar must know; None if calls are not constrained."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise _refuse("tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ...}}')
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise _refuse("tool_choice", "needs tools; send them or leave it out")
        return None
    tools = [tool["function"] for tool in body.tools]  # their shape is checked by deepseek-recipe
    must = choice == "required" or isinstance(choice, dict)
    is_free = body.parallel_tool_calls is not False and not any(tool.get("strict") for tool in tools)
    if choice == "none" or (not must and is_free and asked_form(body) is None):
        return None
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    found = []
    for index, tool in enumerate(tools):
        if wanted in (None, tool["name"]):
            param = f"tools[{index}].function.parameters"
            schema = _arguments(param, tool, is_needed=must)
            found.append({"name": tool["name"], "parameters": schema})
    return found


def _arguments(param: str, tool: dict[str, Any], is_needed: bool) -> object:
    """The schema of a tool's arguments; any object where its calls need only be well-formed."""
    is_strict = bool(tool.get("strict"))
    if '"' in tool["name"] or "\n" in tool["name"]:
        raise _refuse(param.replace("parameters", "name"), "may not hold quotes or line ends")
    if not (is_strict or is_needed) or not tool.get("parameters"):
        return ANY_OBJECT
    form = _of_schema(param, tool["parameters"], is_strict)
    _parsed(GrammarSpec(form.kind, form.text), param)
    return form.schema


def _tools_format(body: ChatBody, form: Form | None, tools: list[Format]) -> Format:
    is_parallel = body.parallel_tool_calls is not False
    is_needed = body.tool_choice not in (None, "auto")
    if form is not None:
        if is_needed:
            raise _refuse(form.param, "asks for another answer than tool_choice; leave one out")
        if form.schema is None:
            raise _refuse(form.param, "cannot be combined with tools; set tool_choice to none, or ask for JSON")
        _parsed(GrammarSpec(form.kind, form.text), form.param)
        return json_or_block(form.schema, tools, is_parallel)
    return rest_of_block(tools, is_parallel) if is_needed else text_with_block(tools, is_parallel)


def _parsed(spec: GrammarSpec, param: str) -> GrammarSpec:
    if reason := objection(spec):
        raise BadRequestError(f"{param} is no {spec.kind} grammar: {reason}", param=param, code="invalid_grammar")
    return spec


def _refuse(param: str, rule: str) -> BadRequestError:
    return BadRequestError(f"{param} {rule}", param=param, code="invalid_value")
