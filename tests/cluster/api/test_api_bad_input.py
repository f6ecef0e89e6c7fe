"""Bad input is harmless: the right status, an error object naming the field, and the next request works."""

import asyncio
import struct
import zlib

import pytest
from api_world import MODEL, data_url, image_part, picture, serve

HI = [{"role": "user", "content": "hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


def refused(response, status=400):
    """The error object of a refusal."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    return error


FIELDS = [
    ({"foo": 1}, "foo", "unknown field"),
    ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus", "unknown field"),
    ({"messages": ...}, "messages", "missing"),
    ({"model": ...}, "model", "missing"),
    ({"model": 7}, "model", "Expected `str`"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "Expected `array`"),
    ({"messages": ["hi"]}, "messages[0]", "Expected `object`"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "must be"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages", "wizard"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages[0].colour", "unknown field"),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0].type", "must be text"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text", "text"),
    ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages", "tool"),
    ({"max_tokens": -1}, "max_tokens", "must be from 1"),
    ({"max_tokens": 0}, "max_tokens", "must be from 1"),
    ({"max_tokens": 1.5}, "max_tokens", "Expected `int"),
    ({"max_tokens": "9"}, "max_tokens", "Expected `int"),
    ({"max_tokens": True}, "max_tokens", "Expected `int"),
    ({"max_tokens": 10**30}, "max_tokens", ""),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "must be from 1"),
    ({"temperature": -0.1}, "temperature", "must be from 0 to 2"),
    ({"temperature": 2.1}, "temperature", "must be from 0 to 2"),
    ({"temperature": "hot"}, "temperature", "Expected `float"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "must be from 0 to 1"),
    ({"top_k": -2}, "top_k", "must be positive"),
    ({"min_p": -1}, "min_p", "must be from 0"),
    ({"seed": -1}, "seed", "must be from 0"),
    ({"priority": 2**40}, "priority", "must be from"),
    ({"priority": "high"}, "priority", "int"),
    ({"user": 5}, "user", "str"),
    ({"user": "u" * 257}, "user", "at most 256 characters"),
    ({"n": 0}, "n", "must be from 1 to 8"),
    ({"n": 9}, "n", "must be from 1 to 8"),
    ({"n": -1}, "n", "must be from 1 to 8"),
    ({"stop": ""}, "stop", "1 to 256"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop[0]", "Expected `str`"),
    ({"stop": "x" * 300}, "stop", "1 to 256"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs = true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be from 0 to 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
    ({"response_format": {"type": "json_object"}}, "messages", "the word 'json'"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"logit_bias": {"1": 500}}, "logit_bias['1']", "from -100 to 100"),
    ({"logit_bias": {"hello": 5}}, "logit_bias['hello']", "a token id as its key"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "0 or more"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "at most max_tokens = 10"),
    ({"traffic_class": "vip"}, "traffic_class", "vip"),
    ({"thinking": {"type": "maybe"}}, "thinking.type", "maybe"),
    ({"reasoning_effort": "vast"}, "messages", "vast"),
    ({"tools": [{"type": "hammer"}]}, "messages", "hammer"),
    ({"cache_salt": "x" * 300}, "cache_salt", "256"),
]


async def test_every_bad_field_is_refused_by_name(world):
    for body, param, rule in FIELDS:
        error = refused(await world.post(body))
        assert error["param"] == param, (body, error)
        assert rule in error["message"], (body, error)
        assert error["type"] == "invalid_request_error"
    assert world.service.jobs == []
    await world.works()


async def test_harmless_fields_of_common_clients_are_accepted(world):
    world.play("ok")
    body = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "parallel_tool_calls": True,
        "top_k": -1, "stop": None, "chat_template_kwargs": {"thinking": False},
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "bob"},
            {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None},
            {"role": "user", "content": "c"},
        ],
    }  # fmt: skip
    response = await world.post(body)
    assert response.status_code == 200, response.text


BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"{'model': 1}", "not valid JSON"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b'{"model": "\xc3\x28"}', ""),
    (b'{"model": "\\ud800", "messages": []}', "not valid JSON"),
    (b"[]", "Expected `object`"),
    (b"null", "Expected `object`"),
    (b'"text"', "Expected `object`"),
    (b'{"a":' * 100_000, ""),
    (b"[" * 100_000, ""),
    (b'{"model": "m", "messages": [{"x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}]}", ""),
    (b'{"model": NaN}', "not valid JSON"),
    (b'{"model": "' + MODEL.encode() + b'", "messages": [], "temperature": 1e999}', ""),
]


async def test_bodies_that_are_not_requests(world):
    for raw, rule in BODIES:
        error = refused(await world.post(content=raw))
        assert rule in error["message"], (raw[:40], error)
    await world.works()


def nested(levels):
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("levels", [100, 200, 500, 950, 990, 1100, 20_000])
async def test_nesting_of_any_depth(world, levels):
    head = b'{"model": "%s", "messages": [{"role": "user", "content": "x"}], ' % MODEL.encode()
    for field in (
        b'"tool_choice": %s}',
        b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]}',
        b'"response_format": %s}',
    ):
        refused(await world.post(content=head + field % nested(levels)))
    await world.works()


async def test_unknown_model_route_and_method(world):
    error = refused(await world.post({"model": "gpt-9"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]
    refused(await world.http.get("/v2/nothing"), 404)
    refused(await world.http.get("/v1/chat/completions"), 405)


async def test_prompts_and_outputs_over_the_context(world):
    error = refused(await world.post({"messages": [{"role": "user", "content": "fish " * 5000}]}))
    assert error["code"] == "context_length_exceeded"
    error = refused(await world.post({"max_tokens": 4096}))
    assert error["code"] == "context_length_exceeded"
    assert "at most 409" in error["message"]
    await world.works()


async def test_a_body_over_the_limit_is_413_declared_or_not(world):
    big = b'{"model": "' + b"x" * (1 << 20) + b'"}'
    assert refused(await world.post(content=big), 413)["code"] == "request_too_large"

    async def pieces():
        for _ in range(40):
            yield b"x" * 40_000

    refused(await world.post(content=pieces()), 413)
    await world.works()


async def test_a_body_that_never_arrives_is_408():
    async with serve(body_timeout_s=0.1) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()
        await world.works()


async def test_bad_headers(world):
    for headers in ({"x-request-id": "a b"}, {"x-request-id": "x" * 200}):
        assert refused(await world.post({}, headers=headers))["param"] == "x-request-id"
    for value in ("0", "-5", "soon", "1.5", "9" * 30):
        assert refused(await world.post({}, headers={"x-deadline-ms": value}))["param"] == "x-deadline-ms"
    await world.works()


def png_declaring(width, height):
    """A tiny PNG file whose header claims a huge picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")
    )


IMAGES = [
    ("http://example.com/a.png", "'http' is not fetched"),
    ("https://127.0.0.1/a.png", "'https' is not fetched"),
    ("file:///etc/passwd", "'file' is not fetched"),
    ("just text", "'none' is not fetched"),
    ("", "'none' is not fetched"),
    ("data:image/png;base64", "not a data URL"),
    ("data:image/png;base64,", "not an image"),
    ("data:image/png;base64,@@@@", "base64 is broken"),
    ("data:image/png;base64,AAA", "base64 is broken"),
    ("data:image/png;base64,AAAA", "not an image"),
    ("data:image/png,%89PNG", "not an image"),
    (data_url(picture()[:60]), "cannot be decoded"),
    (data_url(picture(400, 400)[:-30]), "cannot be decoded"),
    (data_url(png_declaring(60_000, 60_000)), "far more pixels"),
    (data_url(png_declaring(2000, 1000)), "2000x1000 pixels"),
    (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "not an image"),
    (data_url(b"\0" * 150_000), "limit"),
]


async def test_every_bad_image_is_refused_with_its_place(world):
    for url, rule in IMAGES:
        parts = [{"type": "text", "text": "see"}, image_part(url)]
        error = refused(await world.post({"messages": [*HI, {"role": "user", "content": parts}]}))
        assert error["param"] == "messages[1].content[1].image_url", (url[:60], error)
        assert rule in error["message"], (url[:60], error)
        assert len(error["message"]) < 300
    for value in ("data:,x", {"url": 3}, {"href": "x"}, {"url": "data:,x", "size": 3}, {"url": "x", "detail": "vast"}):
        parts = [{"type": "image_url", "image_url": value}]
        error = refused(await world.post({"messages": [{"role": "user", "content": parts}]}))
        assert error["param"] == "messages[0].content[0].image_url"
    assert world.service.jobs == []
    await world.works()


async def test_too_many_images():
    async with serve(images_max=2) as world:
        parts = [image_part(data_url(picture()))] * 3
        error = refused(await world.post({"messages": [{"role": "user", "content": parts}]}))
        assert (error["code"], error["param"]) == ("too_many_images", "messages[0].content[2].image_url")


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I;16"])
async def test_every_pixel_format_becomes_rgb(world, mode):
    world.play("ok")
    kind = "JPEG" if mode == "CMYK" else "PNG"
    parts = [image_part(data_url(picture(30, 20, kind, mode)))]
    response = await world.post({"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 200, response.text
    assert world.service.jobs[0].canvases[0].shape == (42, 42, 3)
