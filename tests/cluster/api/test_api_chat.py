"""Chat completions as clients see them, over real HTTP with the openai package."""

import asyncio
import json
import time

import openai
import pytest
from api_world import CODEC, EOS, MODEL, batches, data_url, ids_of, image_part, picture, serve, with_logprobs
from shoal.cluster.api.errors import EngineError, FullError, PromptTooLongError, UnavailableError
from shoal.cluster.api.jobs import TokenBatch
from shoal.engines.core.request import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")
FISH = "Ein 🐟 schwimmt; 魚が泳ぐ."


async def gather(stream):
    """(content, reasoning, finish reason, usage, events) of a stream."""
    content, reasoning, finish, usage, events = "", "", None, None, []
    async for event in stream:
        events.append(event)
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    return content, reasoning, finish, usage, events


async def test_a_whole_answer_with_usage(world):
    world.service.script = [TokenBatch(cached_tokens=2), *batches([*ids_of(FISH), EOS])]
    answer = await world.chat(max_tokens=200, seed=5, temperature=0, top_p=0.5)
    job = world.service.jobs[0]
    assert answer.choices[0].message.content == FISH
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage.completion_tokens == len(ids_of(FISH)) + 1
    assert answer.usage.prompt_tokens == len(job.token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.prompt_cache_hit_tokens == 2
    assert answer.usage.prompt_cache_miss_tokens == len(job.token_ids) - 2
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.seed) == (0, 0.5, 5)
    assert (job.sampling.max_tokens, job.sampling.top_k, job.sampling.logprobs) == (200, -1, None)
    assert world.service.closed == {job.request_id: "finished"}


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_stream_never_splits_a_character(world, size):
    world.play(FISH, size, finish=FinishReason.LENGTH)
    stream = await world.chat(stream=True, stream_options={"include_usage": True})
    content, _, finish, usage, events = await gather(stream)
    assert content == FISH
    assert finish == "length"
    assert usage.completion_tokens == len(ids_of(FISH))
    assert all("�" not in (choice.delta.content or "") for event in events for choice in event.choices)
    assert events[0].choices[0].delta.role == "assistant"


async def test_usage_is_not_streamed_unless_asked_for(world):
    world.play("hello")
    response = await world.post({"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    assert "usage" not in response.text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("size", [1, 2, 50])
async def test_a_stop_string_never_leaks_and_ends_the_sequence(world, size, is_stream):
    text = "one two STOP three"
    through = next(n for n in range(len(ids_of(text))) if "STOP" in text_of(ids_of(text)[:n]))
    world.service.script = [
        *batches(ids_of(text), size)[:-1],
        *([TokenBatch(tuple(ids_of(text)))] * (size == 50)),
        "forever",
    ]
    answer = world.chat(
        stop=["STOP", "never"], stream=is_stream, **({"stream_options": {"include_usage": True}} if is_stream else {})
    )
    if is_stream:
        content, _, finish, usage, events = await gather(await answer)
        assert all("S" not in (choice.delta.content or "") for event in events for choice in event.choices)
    else:
        whole = await answer
        content, finish, usage = whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage
    assert content == "one two "
    assert finish == "stop"
    assert usage.completion_tokens == through
    assert list(world.service.closed.values()) == ["aborted"]


def text_of(token_ids):
    return b"".join(CODEC.tokens.of(i) for i in token_ids).decode(errors="replace")


async def test_text_that_only_began_a_stop_string_comes_at_the_end(world):
    world.play("almost STO", finish=FinishReason.LENGTH)
    answer = await world.chat(stop="STOP")
    assert answer.choices[0].message.content == "almost STO"


async def test_penalties_and_token_rules_reach_the_job(world):
    world.play("ok", finish=FinishReason.LENGTH)
    rules = {"repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [7, 9]}
    await world.chat(
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={"17": -100, "4": 2.5}, max_tokens=9, extra_body=rules
    )
    asked = world.service.jobs[0].sampling
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0.5, -1.0, 1.2)
    assert (asked.logit_bias, asked.min_tokens, asked.stop_token_ids) == (((17, -100.0), (4, 2.5)), 2, (7, 9))


@pytest.mark.parametrize("size", [1, 100])
async def test_stop_strings_do_not_count_below_the_least_length(world, size):
    """The first two words lie within min_tokens: only the third STOP ends the answer."""
    text = "a STOP b STOP c STOP d"
    least = len(ids_of("a STOP b STOP"))
    world.play(text, size, finish=FinishReason.LENGTH)
    answer = await world.chat(stop="STOP", extra_body={"min_tokens": least})
    assert answer.choices[0].message.content == "a STOP b STOP c "
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_have_one_entry_a_token(world, is_stream):
    token_ids = ids_of("hi 🐟")
    world.service.script = [with_logprobs(batch) for batch in batches(token_ids, 2)]
    answer = await world.chat(logprobs=True, top_logprobs=2, stream=is_stream)
    if is_stream:
        entries = [e async for event in answer for c in event.choices if c.logprobs for e in c.logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "hi 🐟"
    assert [entry.logprob for entry in entries] == [-0.5] * len(token_ids)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert world.service.jobs[0].sampling.logprobs == 2


async def test_logprobs_do_not_leak_a_stop_string(world):
    world.service.script = [with_logprobs(batch) for batch in batches(ids_of("ab STOP cd"), 3)]
    answer = await world.chat(logprobs=True, stop="STOP")
    shown = b"".join(bytes(entry.bytes) for entry in answer.choices[0].logprobs.content).decode()
    assert answer.choices[0].message.content == "ab "
    assert "ab ".startswith(shown)


async def test_choices_are_independent_jobs_with_derived_seeds(world):
    world.service.script = lambda job: batches(ids_of(f"choice {job.choice}"), 1)
    answer = await world.chat(n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == ["choice 0", "choice 1", "choice 2"]
    seeds = [job.sampling.seed for job in sorted(world.service.jobs, key=lambda job: job.choice)]
    assert seeds == [7, 8, 9]
    first, *others = sorted(world.service.jobs, key=lambda job: job.choice)
    assert first.followers == tuple((job.request_id, job.sampling.seed) for job in others)
    assert (first.leader, {job.leader for job in others}) == ("", {first.request_id})
    assert not any(job.followers for job in others)
    again = await world.chat(n=3, seed=7, stream=True)
    texts = ["", "", ""]
    async for event in again:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["choice 0", "choice 1", "choice 2"]
    assert sorted(job.sampling.seed for job in world.service.jobs[3:]) == sorted(seeds)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("size", [1, 4])
async def test_reasoning_is_split_from_the_answer(world, size, is_stream):
    marker = next(i for i, spelling in CODEC.tokens.special.items() if spelling == "</think>")
    world.service.script = batches([*ids_of("let me see 🐟"), marker, *ids_of("It is 84. STOP x")], size)
    on = {"thinking": {"type": "enabled"}}
    answer = await world.chat(extra_body=on, stop="STOP", stream=is_stream)
    if is_stream:
        content, reasoning, finish, _, _ = await gather(answer)
    else:
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        content, reasoning = message.content, message.reasoning_content
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(ids_of("let me see 🐟"))
    assert (reasoning, content, finish) == ("let me see 🐟", "It is 84. ", "stop")


CALLS = (
    'Let me look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Köln</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


@pytest.mark.parametrize("size", [1, 2, 7, 500])
async def test_tool_calls_stream_as_they_come_whole(world, size):
    token_ids = encode_with_markers(CALLS)
    world.service.script = batches([*token_ids, EOS], size)
    whole = await world.chat(tools=TOOLS)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln", "days": 3}
    content, arguments, pieces, finish = "", "", 0, None
    async for event in await world.chat(tools=TOOLS, stream=True):
        for choice in event.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                arguments += call.function.arguments or ""
                pieces += 1
    assert (content, finish) == ("Let me look.", "tool_calls")
    assert arguments == message.tool_calls[0].function.arguments
    assert pieces > 3 or size > 2


def encode_with_markers(text):
    """Tokens of a generated text: the DSML marker is one special token, the rest plain text."""
    marker = next(i for i, spelling in CODEC.tokens.special.items() if spelling == "｜DSML｜")
    pieces = text.split("｜DSML｜")
    out = ids_of(pieces[0])
    for piece in pieces[1:]:
        out += [marker, *ids_of(piece)]
    return out


async def test_images_travel_as_canvases_with_spans(world):
    world.play("nice")
    parts = [
        {"type": "text", "text": "look <｜deepseek_image｜>"},
        image_part(data_url(picture(60, 50))),
        image_part(data_url(picture(10, 100, "JPEG"), "image/jpeg")),
    ]
    await world.chat(messages=[{"role": "user", "content": parts}])
    job = world.service.jobs[0]
    assert [(span.grid_rows, span.grid_columns) for span in job.spans] == [(2, 2), (3, 1)]
    assert [canvas.shape for canvas in job.canvases] == [(84, 84, 3), (126, 42, 3)]
    assert tuple(job.canvases[0][10, 10]) == (255, 0, 0)
    placed = [at for at, token_id in enumerate(job.token_ids) if token_id == CODEC.image_token_id]
    assert placed == [at for span in job.spans for at in range(span.start, span.end)]
    assert [span.length for span in job.spans] == [8, 8]


async def test_request_ids_salts_classes_and_deadlines_reach_the_job(world):
    world.play("ok")
    response = await world.post(
        {
            "cache_salt": "tenant",
            "priority": -3,
            "traffic_class": "agent",
            "user": "ann",
            "ignore_eos": True,
            "top_k": 5,
            "min_p": 0.1,
        },
        headers={"x-request-id": "mine-1", "x-deadline-ms": "5000"},
    )
    job = world.service.jobs[0]
    assert response.headers["x-request-id"] == "mine-1"
    assert (job.client_request_id, job.cache_salt, job.priority, job.traffic_class) == ("mine-1", "tenant", -3, "agent")
    assert (job.sampling.ignore_eos, job.sampling.top_k, job.sampling.min_p) == (True, 5, 0.1)
    assert job.deadline_us - job.arrival_us == 5_000_000
    assert (job.user, job.is_urgent) == ("ann", True)
    await world.post({})
    unhurried = world.service.jobs[1]
    assert (unhurried.user, unhurried.priority, unhurried.is_urgent) == ("", 0, False)
    assert (await world.http.get("/health")).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (FullError(2.5), 429, openai.RateLimitError),
        (UnavailableError("no decode group is alive"), 503, openai.InternalServerError),
        (UnavailableError("no decode group is alive", 1.2), 503, openai.InternalServerError),
        (PromptTooLongError("too long"), 400, openai.BadRequestError),
        (EngineError("the group was lost three times"), 500, openai.InternalServerError),
        (RuntimeError("a bug"), 500, openai.InternalServerError),
    ],
)
async def test_a_refusal_has_its_own_status_also_when_streaming(world, error, status, kind, is_stream):
    world.service.script = [error]
    with pytest.raises(kind) as caught:
        await world.chat(stream=is_stream)
    assert caught.value.status_code == status
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert "Traceback" not in str(caught.value.body)
    retry_after = {429: "3", 503: "2" if getattr(error, "retry_after_s", 0) else None}.get(status)
    assert caught.value.response.headers.get("retry-after") == retry_after
    await world.works()


async def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(world):
    world.service.script = [TokenBatch(tuple(ids_of("so far"))), EngineError("the group was lost")]
    stream = await world.chat(stream=True)
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    assert (await anext(stream)).choices[0].delta.content == "so far"
    with pytest.raises(openai.APIError, match="the group was lost"):
        await anext(stream)
    await world.works()


async def test_a_service_that_breaks_its_contract_is_an_error_event_too(world):
    token_ids = tuple(ids_of("so far"))
    world.service.script = [with_logprobs(TokenBatch(token_ids)), 0.1, TokenBatch(token_ids)]  # no log-probabilities
    stream = await world.chat(stream=True, logprobs=True)
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    assert (await anext(stream)).choices[0].delta.content == "so far"
    with pytest.raises(openai.APIError, match="internal error"):
        await anext(stream)
    await world.works()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.REFUSED])
async def test_a_sequence_that_ended_badly_is_an_error(world, reason):
    world.service.script = [TokenBatch((), finish_reason=reason, detail="why")]
    with pytest.raises(openai.InternalServerError, match="why"):
        await world.chat()


async def test_an_answer_without_an_end_is_an_error(world):
    world.service.script = [TokenBatch(tuple(ids_of("cut")))]
    with pytest.raises(openai.InternalServerError, match="without a reason"):
        await world.chat()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_ends_the_request_and_aborts_the_sequence(world, is_stream):
    world.service.script = ["forever"]
    response = await world.post({"stream": is_stream}, headers={"x-deadline-ms": "80"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert list(world.service.closed.values()) == ["aborted"]


async def test_comments_keep_a_queued_stream_alive():
    async with serve(status_grace_s=0.05, keepalive_s=0.05) as world:
        world.service.script = [0.25, *batches(ids_of("late"), 10)]
        response = await world.post({"stream": True})
        lines = response.text.splitlines()
        assert lines.count(": waiting") >= 3
        assert "late" in response.text
        world.service.script = [0.25, FullError(1)]
        response = await world.post({"stream": True})
        assert response.status_code == 200
        assert '"code":"server_overloaded"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{"stream": False}, {"stream": True}, {"stream": True, "n": 3}])
async def test_a_client_that_leaves_aborts_every_sequence(world, body):
    world.service.script = [TokenBatch(tuple(ids_of("hello"))), "forever"]
    request = asyncio.create_task(world.post(body))
    count = body.get("n", 1)
    await world.service.until(lambda: len(world.service.jobs) == count)
    request.cancel()
    await world.service.until(lambda: len(world.service.closed) == count)
    assert set(world.service.closed.values()) == {"aborted"}
    await world.works()
    assert "shoal:api_requests_aborted_total" in (await world.http.get("/metrics")).text


async def test_a_failed_choice_aborts_the_others(world):
    world.service.script = lambda job: [EngineError("lost")] if job.choice == 1 else ["forever"]
    with pytest.raises(openai.InternalServerError, match="lost"):
        await world.chat(n=3)
    assert sorted(world.service.closed.values()) == ["aborted", "aborted", "failed"]


async def test_thirty_two_streams_at_once_get_each_its_own_text(world):
    def script(job):
        text = f"stream {job.client_request_id} " + "🐟魚 " * 20
        for batch in batches(ids_of(text), 3):
            yield 0.002
            yield batch

    world.service.script = script

    async def one(number):
        response = await world.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            extra_headers={"x-request-id": f"r{number}"},
            extra_body={"thinking": {"type": "disabled"}},
        )
        return (await gather(response))[0]

    texts = await asyncio.gather(*(one(number) for number in range(32)))
    assert texts == [f"stream r{number} " + "🐟魚 " * 20 for number in range(32)]
    assert set(world.service.closed.values()) == {"finished"}


async def test_models_health_ready_version(world):
    assert [model.id async for model in world.client.models.list()] == [MODEL, "shoal-alias"]
    assert (await world.client.models.retrieve("shoal-alias")).id == "shoal-alias"
    with pytest.raises(openai.NotFoundError):
        await world.client.models.retrieve("gpt")
    assert (await world.http.get("/health")).json() == {"status": "ok"}
    assert (await world.http.get("/ready")).status_code == 200
    world.service.is_ready = False
    response = await world.http.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")
    assert (await world.http.get("/version")).json()["version"]


async def test_metrics_join_the_clusters(world):
    world.play("hello", cached=1)
    await world.chat()
    world.service.metrics = (
        "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 4\nshoal:handoffs_total 3\n'
    )
    text = (await world.http.get("/metrics")).text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'vllm:num_requests_running{model_name="shoal-toy"} 0.0' in text
    assert 'vllm:num_requests_running{engine="0"} 4' in text
    assert "shoal:handoffs_total 3" in text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="shoal-toy"}' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="shoal-toy"}' in text
    assert "shoal:api_cluster_metrics_up 1.0" in text
    world.service.metrics = RuntimeError("gone")
    text = (await world.http.get("/metrics")).text
    assert "shoal:api_cluster_metrics_up 0.0" in text
    assert "vllm:prompt_tokens_total" in text


async def test_keys_are_checked_when_there_are_any():
    async with serve(api_keys=("key", "other")) as world:
        world.play("in")
        assert (await world.chat()).choices[0].message.content == "in"
        response = await world.post({})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        response = await world.post({}, headers={"authorization": "Bearer kéy".encode()})
        assert response.status_code == 401
        assert (await world.http.get("/health")).status_code == 200


async def test_large_requests_are_prepared_beside_the_streams():
    async with serve(prepare_queue_max=1, prepare_threads=1, context_tokens=1 << 20) as world:
        world.play("ok")
        long = {"messages": [{"role": "user", "content": "many fish " * 20_000}]}
        answers = await asyncio.gather(*(world.post(long) for _ in range(4)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[0] == 200
        assert set(statuses) <= {200, 429}
        await world.works()
        assert (await world.post(long)).status_code == 200


async def test_a_slow_reader_slows_its_own_sequence_only(world):
    pulled = []

    def script(job):
        for number in range(100_000):
            pulled.append(number)
            yield TokenBatch(tuple(ids_of("word " * 50)))

    reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
    world.service.script = script
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readline()
    started, before = time.monotonic(), -1
    while len(pulled) != before and time.monotonic() - started < 10:
        before = len(pulled)
        await asyncio.sleep(0.3)
    assert 0 < len(pulled) < 100_000
    assert len(pulled) == before
    writer.close()
    await world.service.until(lambda: len(world.service.closed) == 1)
    await world.works()
