"""The demo asks what training rendered, believes only right answers, and fails when anything is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from shoal.cluster.api.body import parse_body
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.commands.client import Reply
from shoal.cluster.commands.demo import Asked, _judge
from shoal.cluster.commands.demo_questions import about_a_text, answer_of, asked, body_of, others, told
from shoal.cluster.live.pixels import ModelPixels
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tasks import schema
from shoal.engines.toy.tasks.encoding import Codec, encode
from shoal.engines.toy.tasks.mixture import examination_random
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tokenizer import TOKENIZER_FILE

SAMPLES = (*about_a_text(), *(question.sample for question in others()))
TASKS = ("recall", "recall", "pictures", "arithmetic", "schema", "tools", "chat")
FROM_STORE = 256  # whole blocks of 128 tokens before the last 140 of a prompt of 396 and more
SETTINGS = ApiSettings(context_tokens=4096, thinking_default=False)


def reply(text: str = "", cached: int = 0, **fields) -> Reply:
    usage = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": cached}}
    given = {"reasoning": "", "calls": (), "finish_reason": "stop", "usage": usage, "ttft_s": 0.1, "total_s": 0.2}
    return Reply(text, **(given | fields))


def replied(answer: Answer) -> Reply:
    """A reply that says this answer, as the API would give it."""
    calls = tuple((name, json.dumps(given)) for name, given in answer.calls)
    return reply(answer.text, reasoning=answer.reasoning, calls=calls)


def test_every_task_that_the_readme_promises_is_asked() -> None:
    assert tuple(sample.task for sample in SAMPLES) == TASKS


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.of()


@pytest.fixture(scope="module")
def service(codec: Codec, tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory: Path = tmp_path_factory.mktemp("toy")
    (directory / "config.json").write_text(json.dumps(toy_config(codec.tokenizer).to_dict()))
    return ChatCodec.from_file(TOKENIZER_FILE, ModelPixels(directory))


@pytest.mark.parametrize("sample", SAMPLES, ids=TASKS)
def test_the_server_computes_what_training_rendered(sample: Sample, service: ChatCodec, codec: Codec) -> None:
    body = parse_body(json.dumps(body_of(sample, "shoal-toy")).encode(), SETTINGS)
    prompt, rendered = service.encode(body, SETTINGS), encode(sample, codec)
    assert prompt.token_ids == tuple(rendered.ids[: rendered.prompt_len].tolist())
    assert len(prompt.canvases) == len(rendered.canvases)
    assert all(map(np.array_equal, prompt.canvases, rendered.canvases))
    assert prompt.tokens_max >= len(rendered.ids) - rendered.prompt_len, "the right answer has room"
    assert body.temperature == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=TASKS)
def test_only_the_right_answer_is_right(sample: Sample) -> None:
    assert sample.is_right(answer_of(replied(sample.wanted)))
    assert not sample.is_right(answer_of(replied(Answer())))
    others_wanted = [other.wanted for other in SAMPLES if other is not sample]
    assert not any(sample.is_right(answer_of(replied(wanted))) for wanted in others_wanted)


def test_both_codes_lie_in_the_part_that_comes_from_the_store(codec: Codec) -> None:
    first, second = about_a_text()
    assert second.messages[0] == first.messages[0]
    assert first.wanted.text != second.wanted.text
    assert encode(first, codec).prompt_len - 140 >= FROM_STORE
    text = str(first.messages[0]["content"])
    for sample in (first, second):
        code = sample.wanted.text.rpartition(" ")[2].rstrip(".")
        upto = text[: text.index(code) + len(code)]
        assert len(codec.tokenizer.encode(upto).ids) + 4 < FROM_STORE, "its KV is not computed again"


def test_a_sample_with_a_wanted_format_is_refused() -> None:
    drawn = (schema.generate(examination_random(1, i)) for i in range(20))
    sample = next(sample for sample in drawn if sample.response_format is not None)
    with pytest.raises(ValueError, match="response_format needs structured output; choose a sample"):
        body_of(sample, "shoal-toy")


@pytest.mark.parametrize("arguments", ["", '{"room": ', '["office"]', "7"])
def test_arguments_that_are_no_object_are_a_wrong_answer(arguments: str) -> None:
    sample = next(sample for sample in SAMPLES if sample.task == "tools")
    ((name, _),) = sample.wanted.calls
    answer = answer_of(reply(calls=((name, arguments),)))
    assert answer.calls == ((name, {"": arguments}),)
    assert not sample.is_right(answer)


def test_what_is_shown_of_questions_and_answers() -> None:
    shown = {sample.task: asked(sample) for sample in SAMPLES[1:]}
    assert asked(SAMPLES[0])[-1].startswith("asked: … ")
    assert shown["pictures"][0].startswith("picture: ")
    assert shown["schema"][0].startswith("system: ")
    assert shown["schema"][1].startswith("asked: ")
    assert all(line.startswith("tool: ") for line in shown["tools"][:-1])
    assert told(Answer(calls=(("wake_me", {"day": "Monday", "hour": 7}),))) == "wake_me(day='Monday', hour=7)"
    assert told(Answer(" Hello. ")) == "Hello."
    assert told(Answer()) == "(nothing)"


GOOD = [Asked("a", reply("It is 7.", cached), True) for cached in (0, 384, 384)]
FAULTS = {
    "the answers to the same question differ": [*GOOD[:2], Asked("a", reply("It is 8.", 384), True)],
    "the store gave nothing back": [*GOOD[:2], Asked("a", reply("It is 7.", 0), True)],
    "2 of 4 answers are right": [GOOD[0], *(replace(ask, is_right=False) for ask in GOOD[1:])],
}


def test_a_demo_in_which_all_is_right_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    _judge(GOOD, GOOD[:1])
    assert "cached prompt tokens: 0, 384, 384\n4 of 4 answers are right\n" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_demo_in_which_something_is_wrong_fails(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        _judge(FAULTS[fault], GOOD[:1])
    assert ended.value.exit_code == 1
    assert fault in capsys.readouterr().err
