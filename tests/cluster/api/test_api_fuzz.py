"""Whatever the bytes or the JSON, parsing and encoding raise nothing but the client's error."""

import json
from contextlib import suppress

import pytest
from api_world import CODEC, MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.cluster.api.body import parse_body
from shoal.cluster.api.errors import BadRequestError, PromptTooLongError
from shoal.cluster.api.settings import ApiSettings

HI = [{"role": "user", "content": "hi"}]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "type", "text", "image_url", "url", "tool_calls", "function", "name", "strict", "x"]
    ), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
names = st.sampled_from(
    ["messages", "model", "stop", "n", "tools", "tool_choice", "stream_options", "seed", "thinking"]
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(names, json_values, max_size=4), st.lists(json_values, max_size=3))
def test_any_json_is_accepted_or_refused_cleanly(fields, messages):
    """Parsing and encoding raise nothing but the client's error, whatever the shape of the body."""

    body = {"model": MODEL, "messages": HI, **fields}
    if messages:
        body["messages"] = messages
    limits = ApiSettings(context_tokens=4096)
    with suppress(BadRequestError, PromptTooLongError):
        CODEC.encode(parse_body(json.dumps(body).encode(), limits), limits)


@given(st.binary(max_size=60))
def test_any_bytes_are_accepted_or_refused_cleanly(raw):
    with pytest.raises(BadRequestError):
        parse_body(raw, ApiSettings(context_tokens=4096))
