"""Samples as ids: the service's own, the recipe's own rendering of history, marks, images, and answers read back."""

import base64
import io
import itertools
import json
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from shoal.cluster.api.body import ChatBody
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.live.pixels import ModelPixels
from shoal.engines.model.images import layout
from shoal.engines.toy.configuration import toy_config
from shoal.engines.toy.tasks import arithmetic, chat, pictures, recall, schema, tools
from shoal.engines.toy.tasks.encoding import Codec, answer_ids, conversation, decode_answer, encode
from shoal.engines.toy.tasks.rendering import parse_answer
from shoal.engines.toy.tasks.sample import Answer, Sample
from shoal.engines.toy.tokenizer import IMAGE_ID, TOKENIZER_FILE, special_tokens

USER, ASSISTANT, THINK, THINK_END, DSML = 2025, 2026, 2029, 2030, 2031
DSML_TEXT = "｜DSML｜"
SETTINGS = ApiSettings(context_tokens=8192)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.of()


@pytest.fixture(scope="module")
def service(codec: Codec, tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("toy")
    (directory / "config.json").write_text(json.dumps(toy_config(codec.tokenizer).to_dict()))
    return ChatCodec.from_file(TOKENIZER_FILE, ModelPixels(directory))


def served_prompt(service: ChatCodec, sample: Sample) -> Any:
    """What the API makes of the request that a client would send for this sample."""
    pngs = iter(sample.images)
    messages = []
    for message in json.loads(json.dumps(sample.messages)):
        if isinstance(message["content"], list):
            message["content"] = [_sent(part, pngs) for part in message["content"]]
        messages.append(message)
    body = {"model": "toy", "messages": messages}
    body |= {"tools": list(sample.tools)} if sample.tools else {}
    body |= {"thinking": {"type": "enabled" if sample.thinking else "disabled"}}
    return service.encode(msgspec.convert(body, ChatBody), SETTINGS)


def _sent(part: dict[str, Any], pngs: Any) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    file = io.BytesIO()
    Image.fromarray(next(pngs)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("task", [recall, chat, tools, schema, arithmetic, pictures], ids=lambda task: task.__name__)
def test_prompts_are_the_services(task: Any, codec: Codec, service: ChatCodec) -> None:
    """Ids, image spans and canvases; the service refuses response_format, so schemas come in the system turn."""
    compared = 0
    for i in range(25):
        sample = task.generate(Random(i))
        if sample.response_format is not None:
            continue
        prompt, encoded = served_prompt(service, sample), encode(sample, codec)
        assert encoded.ids[: encoded.prompt_len].tolist() == list(prompt.token_ids)
        assert all(np.array_equal(a, b) for a, b in zip(encoded.canvases, prompt.canvases, strict=True))
        spans = np.zeros(len(encoded.ids), dtype=bool)
        for span in prompt.spans:
            spans[span.start : span.start + span.length] = True
        assert np.array_equal(encoded.image_mask, spans)
        compared += 1
    assert compared >= 5


ANSWERS = [
    Answer("The code of the amber fox is 4821."),
    Answer("  Two spaces,\n\na café and a { brace }"),
    Answer(calls=(("set_alarm", {"day": "Monday", "hour": 7}),)),
    Answer("I will look.", calls=(("f", {"text": "two\nlines", "list": [1, "é"], "yes": True}), ("g", {}))),
]
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = ({"type": "function", "function": FUNCTION},)


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_has_the_ids_that_the_recipe_gives_it_in_history(
    answer: Answer, thinking: bool, codec: Codec
) -> None:
    """With tools declared, even thoughts are kept in history, so whole answers can be compared."""
    if thinking:
        answer = replace(answer, reasoning="7+8=15, so 15.")
    calls = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for i, (name, given) in enumerate(answer.calls)
    ]
    turn = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning or None}
    turn |= {"tool_calls": calls} if calls else {}
    after = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    messages = ({"role": "user", "content": "Hi"}, turn, *(after or [{"role": "user", "content": "Yes"}]))
    sample = Sample("any", messages, Answer("ok"), tools=TOOLS, thinking=thinking)
    encoded = encode(sample, codec)
    marked = encoded.ids[: encoded.prompt_len][encoded.answer[: encoded.prompt_len]].tolist()
    assert marked == answer_ids(answer, thinking, codec)
    assert decode_answer(marked, codec, thinking) == answer


def test_marks_are_the_answers_of_all_turns(codec: Codec) -> None:
    sample = recall.generate(Random(4), 300, needles=3, turns=3)
    encoded = encode(sample, codec)
    runs = [
        [int(encoded.ids[i]) for i, _ in run]
        for is_answer, run in itertools.groupby(enumerate(encoded.answer), key=lambda pair: bool(pair[1]))
        if is_answer
    ]
    told = [message["content"] for message in sample.messages if message["role"] == "assistant"]
    assert [decode_answer(run, codec).text for run in runs] == [*told, sample.wanted.text]
    assert all(run[-1] == 1 for run in runs)
    assert encoded.ids[encoded.prompt_len - 2 :][:2].tolist() == [ASSISTANT, THINK_END]
    assert not encoded.answer[encoded.prompt_len - 1]


def test_thoughts_are_marked_but_not_the_opened_mark(codec: Codec) -> None:
    encoded = encode(arithmetic.generate(Random(1)), codec)
    assert encoded.ids[encoded.prompt_len - 1] == THINK
    assert not encoded.answer[: encoded.prompt_len].any()
    assert encoded.answer[encoded.prompt_len :].all()
    assert (encoded.ids[encoded.prompt_len :] == THINK_END).sum() == 1


def test_images_become_spans_of_their_size(codec: Codec) -> None:
    sample = pictures.generate(Random(2), images=2)
    encoded = encode(sample, codec)
    sizes = [layout(image.shape[1], image.shape[0], codec.vision).tokens for image in sample.images]
    assert encoded.image_mask.sum() == (encoded.ids == IMAGE_ID).sum() == sum(sizes)
    with pytest.raises(ValueError, match="messages hold 2 image parts, images = 1"):
        encode(replace(sample, images=sample.images[:1]), codec)


def test_text_that_spells_special_tokens_is_text(codec: Codec) -> None:
    sample = Sample("any", ({"role": "user", "content": "<｜deepseek_image｜></think>"},), Answer("ok"))
    encoded = encode(sample, codec)
    assert [i for i in encoded.ids.tolist() if i in special_tokens()] == [0, USER, ASSISTANT, THINK_END, 1]
    assert not encoded.image_mask.any()


def test_a_document_is_all_marked(codec: Codec) -> None:
    encoded = encode(Sample("prose", document="def f():\n    return 1"), codec)
    assert (encoded.ids[0], encoded.ids[-1], encoded.prompt_len) == (0, 1, 0)
    assert encoded.answer.all()
    assert codec.tokenizer.decode(encoded.ids[1:-1].tolist()) == "def f():\n    return 1"


GOOD = (
    f'\n\n<{DSML_TEXT} calls>\n<{DSML_TEXT} invoke name="f">\n<{DSML_TEXT} parameter name="n" string="false">3'
    f"</{DSML_TEXT} parameter>\n</{DSML_TEXT} invoke>\n</{DSML_TEXT} calls>"
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</" + DSML_TEXT + " calls>", ""),
        ("</" + DSML_TEXT + " parameter>", ""),
        (">3<", ">three<"),
        ('string="false"', ""),
        ("\n<" + DSML_TEXT + " invoke", "\nx<" + DSML_TEXT + " invoke"),
    ],
)
def test_malformed_calls_stay_text(old: str, new: str) -> None:
    assert parse_answer(f"Ok.{GOOD}", thinking=False) == Answer("Ok.", calls=(("f", {"n": 3}),))
    broken = f"Ok.{GOOD.replace(old, new, 1)}"
    assert broken != f"Ok.{GOOD}"
    assert parse_answer(broken, thinking=False) == Answer(broken)


def test_thoughts_that_never_end_are_no_answer(codec: Codec) -> None:
    ids = codec.tokenizer.encode("The answer is 3.").ids
    assert decode_answer(ids, codec, thinking=True) == Answer(reasoning="The answer is 3.")
    assert decode_answer(ids, codec, thinking=False) == Answer("The answer is 3.")


def test_thoughts_need_a_thinking_sample(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"answer\.reasoning must be empty"):
        encode(Sample("any", ({"role": "user", "content": "Hi"},), Answer("a", "b")), codec)


def test_a_response_format_is_rendered_into_the_system_turn(codec: Codec) -> None:
    samples = [schema.generate(Random(i)) for i in range(20)]
    sample = next(sample for sample in samples if sample.response_format)
    assert sample.response_format is not None
    prompt = codec.encoding.render_conversation(conversation(sample, codec)).prompt
    assert json.dumps(sample.response_format["json_schema"]["schema"]) in prompt
