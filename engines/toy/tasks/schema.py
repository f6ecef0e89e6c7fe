"""JSON: fill the fields of a schema from a sentence that also tells other things, in another order."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from shoal.engines.toy.tasks.records import KINDS, Field, Kind
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tasks.words import joined

# The rest of the samples spell the schema in the system turn, as clients do when a server refuses response_format.
FORMAT_SHARE = 0.6
REQUESTS = (
    "Fill the form: {}", "Turn this into JSON: {}", "Write this as JSON. {}", "{} Give me the JSON.", "{}",
    "Extract the fields from this sentence: {}",
)  # fmt: skip
SYSTEMS = (
    "Answer with JSON of this schema: {}", "Reply only with JSON that fits this schema: {}",
    "Write JSON. The schema is {}",
)  # fmt: skip
_TYPES: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool}


def generate(dice: Random) -> Sample:
    """A sentence of three to six facts and a schema of three to five of them."""
    kind = dice.choice(KINDS)
    told = dice.sample(kind.fields, dice.randint(3, min(6, len(kind.fields))))
    values = {field: field.draw(dice) for field in told}
    asked = dice.sample(told, min(len(told), dice.randint(3, 5)))
    named = [(dice.choice(field.names), field) for field in asked]
    schema = _schema(dice, named, values)
    answer = {name: values[field] for name, field in named}
    request = dice.choice(REQUESTS).format(_sentence(kind, told, values))
    sample = Sample(
        task="schema",
        messages=({"role": "user", "content": request},),
        wanted=Answer(canonical(answer)),
        is_right=partial(has_values, answer),
        is_valid=partial(fits, schema),
    )
    return _with_schema(dice, sample, kind.name, schema)


def canonical(values: Mapping[str, Any]) -> str:
    """The one spelling that is trained: no white space, fields in the order of the schema."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def has_values(wanted: Mapping[str, Any], answer: Answer) -> bool:
    """Whether the answer is a JSON object with just these values, whatever its order and white space."""
    found = _object(answer.text)
    return found is not None and canonical(_sorted(found)) == canonical(_sorted(wanted))


def fits(schema: Mapping[str, Any], answer: Answer) -> bool:
    """Whether the answer is JSON that this flat schema allows; all its fields are required, no others allowed."""
    return object_fits(schema, _object(answer.text))


def object_fits(schema: Mapping[str, Any], found: Mapping[str, Any] | None) -> bool:
    """Whether an object has the required fields, only declared ones, and values of their types and options."""
    if found is None or not set(schema["required"]) <= found.keys() <= schema["properties"].keys():
        return False
    return all(_is_allowed(schema["properties"][name], value) for name, value in found.items())


def _is_allowed(rule: Mapping[str, Any], value: Any) -> bool:
    # In Python a boolean is an integer, in JSON it is none.
    return type(value) is _TYPES[rule["type"]] and value in rule.get("enum", (value,))


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _sorted(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values)}


def _schema(dice: Random, named: list[tuple[str, Field]], values: Mapping[Field, Any]) -> dict[str, Any]:
    """The JSON schema of the fields under the given names, all of them required."""
    properties: dict[str, Any] = {}
    for name, field in named:
        properties[name] = {"type": field.type}
        if field.options:
            others = [option for option in field.options if option != values[field]]
            options = [values[field], *dice.sample(others, min(len(others), dice.randint(1, 3)))]
            properties[name]["enum"] = dice.sample(options, len(options))
    return {"type": "object", "properties": properties, "required": list(properties)}


def _sentence(kind: Kind, told: list[Field], values: Mapping[Field, Any]) -> str:
    return f"{kind.subject} {joined([_clause(field, values[field]) for field in told])}."


def _clause(field: Field, value: Any) -> str:
    return field.clause.format(value) if isinstance(field.clause, str) else field.clause[value]


def _with_schema(dice: Random, sample: Sample, name: str, schema: Mapping[str, Any]) -> Sample:
    if dice.random() < FORMAT_SHARE:
        form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
        return replace(sample, response_format=form)
    system = {"role": "system", "content": dice.choice(SYSTEMS).format(json.dumps(schema))}
    return replace(sample, messages=(system, *sample.messages))
