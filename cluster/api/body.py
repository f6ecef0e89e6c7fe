"""The body of a request: which fields exist, what they may hold, and who refuses what; chat has its own here."""

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
from shoal.cluster.api.errors import BadRequestError
from shoal.cluster.api.jobs import TrafficClass
from shoal.cluster.api.settings import ApiSettings

MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "prefix"})
T = TypeVar("T")
SEED_MAX = 2**63 - 1
NAME_CHARS_MAX = 256


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside the answer."""

    include_usage: bool = False


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """DeepSeek's switch of the thinking mode."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The same switch as vLLM clients spell it."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions have in common: how tokens are chosen, how long, and what queues are asked for.

    Fields below the line are accepted because common clients send them; they change nothing.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    traffic_class: TrafficClass | None = None
    # ---
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, also when one was given alone."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def tokens_max(self) -> int | None:
        """The wanted output limit."""
        return self.max_tokens

    @property
    def tokens_least(self) -> int:
        """The smallest output limit that may be asked for."""
        return 1

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each output token; None: no log-probabilities."""
        return None

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives to score each prompt token with; None: no scores."""
        return self.prompt_logprobs


class ChatBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    """Every accepted field of a chat completion; one that is not here is refused by name."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def tokens_max(self) -> int | None:
        """The wanted output limit; the newer name wins when both are given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each output token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


_DECODER = msgspec.json.Decoder(ChatBody)


def parse_body(raw: bytes, settings: ApiSettings) -> ChatBody:
    """Decode and check a request body. Raises BadRequestError naming the field, its value, the rule and the remedy."""
    body = decode_body(_DECODER, raw)
    _check_chat(body, settings)
    check_sampling(body, settings)
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]")
    return body


def decode_body(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """Decode a request body. Raises BadRequestError."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _refuse_shape(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from error


def check_sampling(body: SamplingBody, settings: ApiSettings) -> None:
    """Check what all bodies share. Raises BadRequestError naming the field, its value, the rule and the remedy."""
    _check_numbers(body, settings)
    _check_combinations(body, settings)


def _check_chat(body: ChatBody, settings: ApiSettings) -> None:
    if not body.messages:
        raise refuse("messages", [], "must hold at least one message")
    check_ranges(body, (("max_completion_tokens", 1, 2**31), ("top_logprobs", 0, settings.top_logprobs_max)))
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")


def _refuse_shape(text: str) -> BadRequestError:
    """Turn msgspec's "... - at `$.stop[0]`" into an error with that path as `param`."""
    what, _, where = text.partition(" - at `")
    param = where.rstrip("`").removeprefix("$").removeprefix(".") or None
    if "unknown field" in what:
        name = what.partition("`")[2].rstrip("`")
        param = f"{param}.{name}" if param else name
        return BadRequestError(f"{param}: unknown field; remove it", param=param, code="unknown_field")
    if "missing required field" in what:
        param = what.partition("`")[2].rstrip("`")
    return BadRequestError(f"{param or 'body'}: {what}", param=param, code="invalid_value")


def refuse(param: str, value: object, rule: str) -> BadRequestError:
    """An error that names a field, its value (cut to what a line holds) and the rule."""
    try:
        shown = repr(value)
    except RecursionError:
        shown = type(value).__name__
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return BadRequestError(f"{param} = {shown} {rule}", param=param, code="invalid_value")


def check_ranges(body: SamplingBody, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Check fields (name, least, most) that are given."""
    for name, low, high in ranges:
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise refuse(name, value, f"must be from {low} to {high}")


def _check_numbers(body: SamplingBody, settings: ApiSettings) -> None:
    ranges: tuple[tuple[str, float, float], ...] = (
        ("max_tokens", body.tokens_least, 2**31),
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0, 10),
        ("min_tokens", 0, 2**31),
        ("seed", 0, SEED_MAX),
        ("n", 1, settings.choices_max),
        ("prompt_logprobs", 0, settings.top_logprobs_max),
        ("priority", -(2**31), 2**31),
    )
    check_ranges(body, ranges)
    if body.top_p == 0:
        raise refuse("top_p", body.top_p, "must be above 0; use temperature 0 for greedy sampling")
    if body.repetition_penalty == 0:
        raise refuse("repetition_penalty", body.repetition_penalty, "must be above 0; 1 is off")
    if body.top_k is not None and body.top_k != -1 and not 0 <= body.top_k <= 2**31:
        raise refuse("top_k", body.top_k, "must be positive, or 0 or -1 for off")


def _check_combinations(body: SamplingBody, settings: ApiSettings) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream = true", param="stream_options", code="invalid_value")
    if body.stream and body.prompt_logprobs is not None:
        rule = "prompt_logprobs are not available with stream = true; ask without"
        raise BadRequestError(rule, param="prompt_logprobs", code="invalid_value")
    if len(body.stops) > settings.stop_strings_max:
        raise refuse("stop", len(body.stops), f"strings; at most {settings.stop_strings_max}")
    for stop in body.stops:
        if not 0 < len(stop) <= settings.stop_string_chars_max:
            raise refuse("stop", stop, f"must have 1 to {settings.stop_string_chars_max} characters")
    for token, bias in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise refuse(f"logit_bias[{token[:40]!r}]", bias, "must have a token id as its key")
        if not -100 <= bias <= 100:
            raise refuse(f"logit_bias[{token!r}]", bias, "must be from -100 to 100")
    for name in ("logit_bias", "stop_token_ids"):
        if len(getattr(body, name) or ()) > settings.token_rules_max:
            raise refuse(name, len(getattr(body, name)), f"tokens; at most {settings.token_rules_max}")
    for token_id in body.stop_token_ids or ():
        if not 0 <= token_id < 2**31:
            raise refuse("stop_token_ids", token_id, "must be token ids, 0 or more")
    if body.tokens_max is not None and (body.min_tokens or 0) > body.tokens_max:
        raise refuse("min_tokens", body.min_tokens, f"must be at most max_tokens = {body.tokens_max}")
    for name in ("cache_salt", "user"):
        if len(getattr(body, name) or "") > NAME_CHARS_MAX:
            raise refuse(name, getattr(body, name), f"must have at most {NAME_CHARS_MAX} characters")


def _check_message(message: dict[str, Any], param: str) -> None:
    """Refuse unknown fields; fields holding null are dropped, since clients send answers back as they came."""
    for name in [name for name, value in message.items() if value is None]:
        del message[name]
    unknown = sorted(message.keys() - MESSAGE_FIELDS)
    if unknown and message.get(unknown[0]) != []:  # `annotations: []` comes back from clients too
        name = f"{param}.{unknown[0]}"
        raise BadRequestError(f"{name}: unknown field; remove it", param=name, code="unknown_field")
    if not isinstance(message.get("role"), str):
        raise refuse(f"{param}.role", message.get("role"), "must be system, user, assistant or tool")
    if message["role"] == "developer":
        message["role"] = "system"
    content = message.setdefault("content", "") if message["role"] == "assistant" else message.get("content")
    if not isinstance(content, str | list):
        raise refuse(f"{param}.content", content, "must be text or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        _check_part(part, f"{param}.content[{index}]")


def _check_part(part: object, param: str) -> None:
    if not isinstance(part, dict):
        raise refuse(param, part, "must be an object")
    kind = part.get("type")
    if kind not in ("text", "image_url"):
        raise refuse(f"{param}.type", kind, "must be text or image_url")
    unknown = sorted(part.keys() - {"type", kind})
    if unknown:
        raise BadRequestError(f"{param}.{unknown[0]}: unknown field; remove it", param=param, code="unknown_field")
    value = part.get(kind)
    if kind == "text" and not isinstance(value, str):
        raise refuse(f"{param}.text", value, "must be text")
    if kind == "image_url":
        _check_image(value, f"{param}.image_url")


def _check_image(value: object, param: str) -> None:
    """`detail` is a hint to servers with several image sizes; this model has one, so it changes nothing."""
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise refuse(param, value, 'must be an object {"url": "data:image/...;base64,..."}')
    if value.keys() - {"url", "detail"} or value.get("detail", "auto") not in ("auto", "low", "high", "original"):
        raise refuse(param, sorted(value), "may hold url and detail (auto, low, high, original)")
