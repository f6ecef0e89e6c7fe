"""`/v1/completions` and `prompt_logprobs` through a real server: texts, token ids, echo, scores, refusals."""

import openai
import pytest
from api_world import CODEC, MODEL, batches, ids_of, with_logprobs
from shoal.cluster.api.jobs import TokenBatch
from shoal.engines.core.request import PromptScore

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOS = 0


def scores(job):
    """Made-up scores of a job's prompt: position p has log-probability -p and one better alternative."""
    return tuple(PromptScore(-float(p), 2, ((7, -0.25), (8, -9.0))) for p in range(1, len(job.token_ids)))


def scored(text):
    """A script that scores the prompt for the first choice, then answers."""

    def script(job):
        first = TokenBatch(prompt_scores=() if job.leader else scores(job))
        return [first, *(with_logprobs(b) if job.sampling.logprobs is not None else b for b in batches(ids_of(text)))]

    return script


async def post(world, **body):
    return await world.http.post("/v1/completions", json={"model": MODEL, "prompt": "a b", **body})


async def test_a_text_is_continued(world):
    world.play(" and more", cached=0)
    answer = await world.client.completions.create(model=MODEL, prompt="once", max_tokens=30, seed=3, n=2)
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in answer.choices] == [
        (0, " and more", "stop", None),
        (1, " and more", "stop", None),
    ]
    job = world.service.jobs[0]
    assert job.token_ids == (BOS, *ids_of("once"))
    assert (job.sampling.max_tokens, job.sampling.logprobs, job.prompt_logprobs) == (30, None, None)
    assert [j.sampling.seed for j in world.service.jobs] == [3, 4]
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len(job.token_ids)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_token_ids_are_taken_as_they_are(world, prompt):
    world.play("x")
    answer = await world.client.completions.create(model=MODEL, prompt=prompt, echo=True)
    assert world.service.jobs[0].token_ids == (5, 6, 7)
    assert world.service.jobs[0].sampling.max_tokens == 16
    assert answer.choices[0].text == b"".join(CODEC.tokens.of(i) for i in (5, 6, 7)).decode(errors="replace") + "x"


async def test_an_echo_with_logprobs_scores_prompt_and_answer(world):
    world.service.script = scored(" yes")
    answer = await world.client.completions.create(model=MODEL, prompt="once more", echo=True, logprobs=1)
    job, choice = world.service.jobs[0], answer.choices[0]
    assert (job.prompt_logprobs, job.sampling.logprobs) == (1, 1)
    ids = [*job.token_ids, *ids_of(" yes")]
    told = choice.logprobs
    assert choice.text == "once more yes"
    assert told.tokens == [CODEC.tokens.of(i).decode() for i in ids]
    assert told.token_logprobs == [
        None,
        *(-float(p) for p in range(1, len(job.token_ids))),
        *[-0.5] * len(ids_of(" yes")),
    ]
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[1] == {told.tokens[1]: -1.0, CODEC.tokens.of(7).decode(): -0.25}
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(len(ids))]


async def test_only_the_echo(world):
    world.service.script = scored(" unseen")
    answer = await world.client.completions.create(model=MODEL, prompt="once", echo=True, logprobs=0, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("once", "length")
    assert len(choice.logprobs.tokens) == len(world.service.jobs[0].token_ids)
    assert world.service.jobs[0].sampling.max_tokens == 1


async def test_a_stream_opens_with_the_echo_and_counts_offsets(world):
    world.play("one two three", size=2)
    stream = await world.client.completions.create(model=MODEL, prompt="zero ", echo=True, stream=True)
    events = [event async for event in stream]
    assert "".join(e.choices[0].text for e in events) == "zero one two three"
    assert events[0].choices[0].text == "zero "
    assert events[-1].choices[0].finish_reason == "stop"
    world.service.script = [with_logprobs(b) for b in batches(ids_of("one two three"), 2)]
    stream = await world.client.completions.create(model=MODEL, prompt="zero ", logprobs=1, stream=True)
    told = [e.choices[0].logprobs async for e in stream if e.choices[0].logprobs]
    tokens, offsets = [t for one in told for t in one.tokens], [o for one in told for o in one.text_offset]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(world):
    world.service.script = scored("ok")
    answer = await world.chat(extra_body={"prompt_logprobs": 2}, n=2)
    job = next(j for j in world.service.jobs if j.choice == 0)
    told = answer.prompt_logprobs
    assert job.prompt_logprobs == 2
    assert told[0] is None
    assert len(told) == len(job.token_ids)
    own = told[1][str(job.token_ids[1])]
    assert (own["logprob"], own["rank"]) == (-1.0, 2)
    assert told[1]["7"] == {"logprob": -0.25, "rank": 1, "decoded_token": CODEC.tokens.of(7).decode()}
    assert "prompt_logprobs" not in (await world.chat()).model_dump()


async def test_prompt_logprobs_of_a_completion_are_in_each_choice(world):
    world.service.script = scored("ok")
    choices = (await post(world, prompt_logprobs=0, n=2)).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [len(world.service.jobs[0].token_ids)] * 2


BAD = [
    ({"prompt": ...}, "prompt", "missing"),
    ({"prompt": []}, "prompt", "at least one token id"),
    ({"prompt": ["a", "b"]}, "prompt", "send each by itself"),
    ({"prompt": [1, "b"]}, "prompt[1]", "must be a token id"),
    ({"prompt": [1, True]}, "prompt[1]", "must be a token id"),
    ({"prompt": [10**9]}, "prompt[0]", "must be a token id"),
    ({"prompt": [0] * 4090}, "prompt", "exceed the context"),
    ({"logprobs": 99}, "logprobs", "must be from 0"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "must be from 0"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream = true"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo", "stream = true"),
    ({"max_tokens": 0}, "max_tokens", "must be from 1"),
    ({"best_of": 3, "n": 2}, "best_of", "must equal n"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"messages": []}, "messages", "unknown field"),
    ({"model": "other"}, "model", "not served"),
]


async def test_what_cannot_be_is_refused_by_name(world):
    for body, param, rule in BAD:
        base = {"model": MODEL, "prompt": "a", **body}
        response = await world.http.post("/v1/completions", json={k: v for k, v in base.items() if v is not ...})
        error = response.json()["error"]
        assert response.status_code in (400, 404), body
        assert error["param"] == param, (body, error)
        assert rule in error["message"], (body, error)
    assert world.service.jobs == []
    chat = await world.post({"prompt_logprobs": 1, "stream": True})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_best_of_that_equals_n_changes_nothing_and_a_bad_key_is_refused(world):
    world.play("x")
    assert (await post(world, best_of=1)).status_code == 200
    with pytest.raises(openai.NotFoundError):
        await world.client.completions.create(model="other", prompt="a")
    assert world.service.jobs[0].n == 1
