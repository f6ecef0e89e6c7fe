"""Answers of a given form over HTTP, with the client people use: prefill, hand-off and decode in one grammar."""

import json

import httpx
import jsonschema
import openai
import pytest
from live.world import World

SCHEMA = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "enum": ["library", "hall"]},
        "hour": {"type": "integer", "minimum": 0, "maximum": 24},
    },
    "required": ["room", "hour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "book", "parameters": SCHEMA}}


@pytest.fixture
def client(world: World) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.http}/v1", api_key="none", max_retries=0, timeout=60)


def test_schemas_calls_choices_and_a_bad_schema(world: World, client: openai.OpenAI) -> None:
    """At temperature 1 and off the tasks the toy was taught: the form is the grammar's doing."""
    ask = {"model": "shoal-toy", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 120}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    for seed in (1, 2):
        whole = client.chat.completions.create(**ask, response_format=form, temperature=1, seed=seed)
        assert whole.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(whole.choices[0].message.content or ""), SCHEMA)
    chunks = list(client.chat.completions.create(**ask, response_format=form, temperature=1, seed=2, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content

    called = client.chat.completions.create(**ask, tools=[TOOL], tool_choice="required", temperature=1, seed=3)
    assert called.choices[0].finish_reason == "tool_calls"
    for call in called.choices[0].message.tool_calls or ():
        assert call.function.name == "book"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert called.choices[0].message.tool_calls

    chosen = client.chat.completions.create(**ask, extra_body={"guided_choice": ["red", "green"]})
    assert chosen.choices[0].message.content in ("red", "green")

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask, extra_body={"guided_json": {"type": "integr"}})
    assert refused.value.param == "guided_json"
    good = {"model": "shoal-toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{world.http}/v1/chat/completions", json=good, timeout=30).status_code == 200
