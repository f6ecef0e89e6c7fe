"""Prompts equal the golden cases; text cannot inject special tokens; images expand where they stand."""

import json

import pytest
from api_world import CODEC, ORACLE, PadTo42, data_url, image_part, picture
from shoal.cluster.api.body import parse_body
from shoal.cluster.api.codec import IMAGE_TOKEN, ChatCodec
from shoal.cluster.api.errors import BadRequestError, PromptTooLongError
from shoal.cluster.api.settings import ApiSettings

CASES = json.loads((ORACLE / "chat_cases.json").read_text())
SETTINGS = ApiSettings(context_tokens=4096, thinking_default=False)


def body_of(messages, **fields):
    return parse_body(json.dumps({"model": "m", "messages": messages, **fields}).encode(), SETTINGS)


def golden_body(case):
    """The case as a client would send it."""
    messages = [dict(message) for message in case["messages"]]
    for message in messages:
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in message["tool_calls"]
            ]
    fields = {"thinking": {"type": "enabled" if case["thinking"] else "disabled"}}
    if "tools" in case:
        fields["tools"] = [{"type": "function", "function": tool} for tool in case["tools"]]
    if "reasoning_effort" in case:
        fields["reasoning_effort"] = case["reasoning_effort"]
    return body_of(messages, **fields)


@pytest.mark.parametrize("case", [case for case in CASES if "image" not in case["name"]], ids=lambda case: case["name"])
def test_golden_prompts(case):
    prompt = CODEC.encode(golden_body(case), SETTINGS)
    assert list(prompt.token_ids) == case["token_ids"]
    assert b"".join(CODEC.tokens.of(i) for i in prompt.token_ids).decode() == case["prompt"]


def test_golden_prompt_with_an_image():
    """The golden text has its image in the middle of a line; parts of a chat message stand in paragraphs."""
    (case,) = [case for case in CASES if "image" in case["name"]]
    before, after = case["messages"][0]["content"].split("<image>")
    parts = [{"type": "text", "text": before}, image_part(data_url(picture(40, 40))), {"type": "text", "text": after}]
    body = body_of([{"role": "user", "content": parts}], thinking={"type": "enabled"}, reasoning_effort="low")
    prompt = CODEC.encode(body, SETTINGS)
    text = b"".join(CODEC.tokens.of(i) for i in collapse(prompt)).decode()
    assert text == case["prompt"].replace(f"{before}{IMAGE_TOKEN}{after}", f"{before}\n\n{IMAGE_TOKEN}\n\n{after}")
    assert [i for i in collapse(prompt) if i in CODEC.tokens.special] == [
        i for i in case["token_ids"] if i in CODEC.tokens.special
    ]


def collapse(prompt):
    """The token ids with each image span back to one placeholder."""
    ids = list(prompt.token_ids)
    for span in reversed(prompt.spans):
        assert set(ids[span.start : span.end]) == {CODEC.image_token_id}
        ids[span.start : span.end] = [CODEC.image_token_id]
    return ids


@pytest.mark.parametrize("spelling", sorted(CODEC.tokens.special.values()))
def test_text_spelling_a_special_token_stays_text(spelling):
    special = set(CODEC.tokens.special)
    plain = CODEC.encode(body_of([{"role": "user", "content": "a  b"}]), SETTINGS)
    spelled = CODEC.encode(body_of([{"role": "user", "content": f"a {spelling} b"}]), SETTINGS)
    assert [i for i in spelled.token_ids if i in special] == [i for i in plain.token_ids if i in special]
    assert spelling in b"".join(CODEC.tokens.of(i) for i in spelled.token_ids).decode()


def test_adjacent_images_and_a_spelled_placeholder():
    parts = [
        image_part(data_url(picture(40, 40))),
        image_part(data_url(picture(80, 40))),
        {"type": "text", "text": f"{IMAGE_TOKEN} and"},
        image_part(data_url(picture(40, 40))),
    ]
    prompt = CODEC.encode(body_of([{"role": "user", "content": parts}]), SETTINGS)
    assert [span.length for span in prompt.spans] == [4, 5, 4]
    assert prompt.spans[0].digest == prompt.spans[2].digest != prompt.spans[1].digest
    assert prompt.token_ids.count(CODEC.image_token_id) == 13


def test_the_models_own_image_rule_gives_the_spans():
    """Spans and canvases of the live preprocessor agree with the model's layout, which has golden cases."""
    from shoal.cluster.live.pixels import ModelPixels
    from shoal.engines.model import images
    from shoal.engines.model.config import ModelConfig

    vision = ModelConfig.from_dir(ORACLE).vision
    codec = ChatCodec.from_file(ORACLE, ModelPixels(ORACLE))
    sizes = [(448, 336), (33, 200), (640, 480)]
    parts = [image_part(data_url(picture(*size))) for size in sizes]
    prompt = codec.encode(body_of([{"role": "user", "content": parts}]), SETTINGS)
    for size, span, canvas in zip(sizes, prompt.spans, prompt.canvases, strict=True):
        plan = images.layout(*size, vision)
        assert (span.length, span.grid_rows, span.grid_columns) == (plan.tokens, plan.rows, plan.columns)
        assert canvas.shape == (plan.canvas_height, plan.canvas_width, 3)
        assert span.digest == images.digest(canvas, vision)


def test_the_output_limit_is_resolved_against_the_context():
    hi = [{"role": "user", "content": "hi"}]
    prompt = CODEC.encode(body_of(hi), SETTINGS)
    assert prompt.tokens_max == 4096 - len(prompt.token_ids)
    assert CODEC.encode(body_of(hi, max_tokens=7, max_completion_tokens=9), SETTINGS).tokens_max == 9
    assert CODEC.encode(body_of(hi), ApiSettings(context_tokens=10**6, thinking_default=False)).tokens_max == 8192
    with pytest.raises(PromptTooLongError, match="4096"):
        CODEC.encode(body_of(hi, max_tokens=4096), SETTINGS)


def test_a_codec_without_a_preprocessor_refuses_images():
    codec = ChatCodec.from_file(ORACLE)
    body = body_of([{"role": "user", "content": [image_part(data_url(picture()))]}])
    with pytest.raises(BadRequestError, match="takes no images"):
        codec.encode(body, SETTINGS)


def test_a_tokenizer_without_the_chat_tokens_is_refused():
    tree = json.loads((ORACLE / "tokenizer.json").read_text())
    tree["added_tokens"] = [entry for entry in tree["added_tokens"] if entry["content"] != "<｜User｜>"]
    with pytest.raises(ValueError, match="<｜User｜>"):
        ChatCodec(json.dumps(tree), PadTo42())
