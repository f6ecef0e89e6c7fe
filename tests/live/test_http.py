"""The public endpoint of a live cluster, with the client people use, good input and bad."""

import base64
import io

import httpx
import openai
import pytest
from live.world import World
from PIL import Image


@pytest.fixture
def client(world: World) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.http}/v1", api_key="none", max_retries=0, timeout=60)


def picture() -> str:
    buffer = io.BytesIO()
    Image.effect_noise((130, 100), 64).convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def test_a_streamed_chat_with_an_image_equals_the_unstreamed_one(world: World, client: openai.OpenAI) -> None:
    content = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "What is this?"}]
    ask = {"model": "shoal-toy", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.completion_tokens <= 12


def test_answers_of_one_request_are_those_of_requests_with_their_seeds(world: World, client: openai.OpenAI) -> None:
    """The others were forked from the first one's prompt, and each is what it would have been alone."""
    ask = {"model": "shoal-toy", "prompt": "The boat is on the", "max_tokens": 12, "temperature": 1.0}
    several = client.completions.create(**ask, seed=11, n=3)
    alone = [client.completions.create(**ask, seed=11 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in several.choices] == alone
    marks = httpx.get(f"{world.http}/debug/requests/{several.id}-2").json()["marks"]
    assert "forked" in [mark["what"] for mark in marks]


def test_an_echo_is_scored(world: World, client: openai.OpenAI) -> None:
    ask = {"model": "shoal-toy", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    told = client.completions.create(**ask, prompt="What is the capital of Norway?", echo=True).choices[0]
    assert told.text.startswith("What is the capital of Norway?")
    assert told.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in told.logprobs.token_logprobs[1:])
    assert len(told.logprobs.tokens) == len(told.logprobs.top_logprobs) > 3


def test_models_health_and_metrics(world: World, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["shoal-toy"]
    assert httpx.get(f"{world.http}/health").status_code == 200
    assert httpx.get(f"{world.http}/ready").status_code == 200
    text = httpx.get(f"{world.http}/metrics").text
    assert 'shoal_members{role="decode",state="ready"} 2' in text
    assert "vllm:prompt_tokens_total" in text


def test_drafts_are_made_verified_and_counted(world: World, client: openai.OpenAI) -> None:
    """By one of the decode groups, and the answer is a chat that the model knows, so that some are accepted."""
    ask = {"model": "shoal-toy", "messages": [{"role": "user", "content": "What is the capital of Poland?"}]}
    client.chat.completions.create(**ask, max_tokens=24, temperature=0)
    text = httpx.get(f"{world.http}/metrics").text
    counts = {
        name: sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}_total{{"))
        for name in (
            "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_draft_tokens",
            "shoal:spec_decode_num_made_tokens",
        )
    }
    accepted, verified, made = counts.values()
    assert 0 < accepted <= verified <= made


BAD_BODIES = [
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[]", 400),
    (b'{"model": "shoal-toy", "messages": [], "max_tokens": 4}', 400),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}', 404),
    (b'{"model": "shoal-toy", "messages": [{"role": "user", "content": "a"}], "max_tokens": -1}', 400),
    (b'{"model": "shoal-toy", "messages": [{"role": "user", "content": "a"}], "n": 1000}', 400),
    (b'{"model": "shoal-toy", "messages": [{"role": "user", "content": "a"}], "nonsense": 1}', 400),
    (b'{"model": "shoal-toy", "messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 9000), 400),
    (
        b'{"model": "shoal-toy", "messages": [{"role": "user", "content": [{"type": "image_url",'
        b' "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}',
        400,
    ),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_input_is_refused_and_the_next_request_works(world: World, body: bytes, status: int) -> None:
    url = f"{world.http}/v1/chat/completions"
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    good = {"model": "shoal-toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(url, json=good, timeout=30).status_code == 200


def test_a_client_that_leaves_frees_everything(world: World) -> None:
    """Disconnect in the middle of an answer: every stage lets go (checked when the test ends, too)."""
    body = {"model": "shoal-toy", "messages": [{"role": "user", "content": "long"}], "max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{world.http}/v1/chat/completions", json=body | {"ignore_eos": True}, timeout=30) as got:
        assert next(line for line in got.iter_lines() if "content" in line)
    world.wait_empty()
