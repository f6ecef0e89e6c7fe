"""Tool calls: choose the declared tool and its arguments, tell a tool's result, or answer without a tool."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from shoal.engines.toy.tasks import chat
from shoal.engines.toy.tasks.catalogue import TOOLS, Tool
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.schema import object_fits

RESULT_SHARE = 0.25
NO_TOOL_SHARE = 0.15


def generate(dice: Random) -> Sample:
    """One to three declared tools and a request: most need one call, some have its result, some need no tool."""
    chosen = dice.sample(TOOLS, dice.randint(1, 3))
    used = chosen[0]
    names = {parameter.key: dice.choice(parameter.names) for parameter in used.parameters}
    own = _declaration(dice, used, names)
    others = [_declaration(dice, tool, {}) for tool in chosen[1:]]
    declared = tuple(dice.sample([own, *others], len(chosen)))
    kind = dice.random()
    if kind < NO_TOOL_SHARE:
        return _without_tool(chat.generate(dice), declared)
    values = {parameter.key: parameter.draw(dice) for parameter in used.parameters}
    call = (own["function"]["name"], {names[key]: value for key, value in values.items()})
    question = {"role": "user", "content": dice.choice(used.requests).format(**values)}
    if kind < NO_TOOL_SHARE + RESULT_SHARE:
        return _with_result(dice, used, values, call, (question, declared))
    wanted = Answer(calls=(call,))
    return Sample(
        task="tools",
        messages=(question,),
        wanted=wanted,
        is_right=partial(is_same_call, wanted),
        is_valid=partial(is_valid_call, declared),
        tools=declared,
    )


def is_same_call(wanted: Answer, answer: Answer) -> bool:
    """Whether the answer calls the same tools with the same arguments, and says nothing else."""
    return _spelled(answer) == _spelled(wanted) and not answer.text.strip()


def is_valid_call(declared: tuple[Mapping[str, Any], ...], answer: Answer) -> bool:
    """Whether the answer is calls only, each of a declared tool, with the arguments that its schema asks for."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in declared}
    return bool(answer.calls) and all(
        name in schemas and object_fits(schemas[name], given) for name, given in answer.calls
    )


def is_plain_text(answer: Answer) -> bool:
    """Whether the answer is text without calls, well-formed or not."""
    return bool(answer.text.strip()) and not answer.calls and "｜DSML｜" not in answer.text


def _spelled(answer: Answer) -> list[tuple[str, str]]:
    return [(name, json.dumps(given, sort_keys=True)) for name, given in answer.calls]


def _declaration(dice: Random, tool: Tool, names: Mapping[str, str]) -> dict[str, Any]:
    """A tool as clients declare it, under one of its names, its parameters named as given or drawn."""
    properties = {names.get(p.key) or dice.choice(p.names): {"type": p.type} for p in tool.parameters}
    function = {
        "name": dice.choice(tool.names),
        "description": tool.description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    return {"type": "function", "function": function}


def _without_tool(talk: Sample, declared: tuple[Mapping[str, Any], ...]) -> Sample:
    return replace(talk, task="tools", tools=declared, is_valid=is_plain_text)


def _with_result(
    dice: Random,
    tool: Tool,
    values: Mapping[str, Any],
    call: tuple[str, Mapping[str, Any]],
    asked: tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]],
) -> Sample:
    """The call is made and its result is there: one sentence has to tell it."""
    question, declared = asked
    result = {key: draw(dice) for key, draw in tool.result.items()}
    wanted = tool.sentence.format(**values, **result)
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    made = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    told = {"role": "tool", "tool_call_id": "1", "content": json.dumps(result)}
    return Sample(
        task="tools",
        messages=(question, made, told),
        wanted=Answer(wanted),
        is_right=partial(chat.says, wanted),
        is_valid=is_plain_text,
        tools=declared,
    )
