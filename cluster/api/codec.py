"""Messages to prompt token ids with images expanded, and generated tokens back to text, for one tokenizer."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialToken,
    SpecialTokens,
    Tokenizer,
)
from shoal.cluster.api.body import ChatBody
from shoal.cluster.api.constraints import check_form, grammar_of
from shoal.cluster.api.errors import BadRequestError, PromptTooLongError
from shoal.cluster.api.images import ImageLimits, ImagePreprocessor, PreparedImage, decode_image_url
from shoal.cluster.api.jobs import Canvas
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.api.splitting import PlainSplitter, RecipeSplitter, Splitter
from shoal.cluster.api.streaming import Detokeniser
from shoal.engines.core.grammar.spec import GrammarSpec
from shoal.engines.core.request import ImageSpan
from shoal.engines.grammar.token_bytes import TokenBytes
from shoal.engines.model.errors import TokenizerError

IMAGE_TOKEN = "<｜deepseek_image｜>"  # the released tokenizer's spelling; deepseek-recipe's own default differs
_ALIAS = "shoal"  # the one model name conversion sees; served names are checked before


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered request: token ids with image spans expanded, what the spans show, and how to parse the answer.

    `tokens_max` is the output limit, resolved: prompt plus output fit the context. A text to continue is no
    `conversation`. `grammar` rules the answer.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]
    canvases: tuple[Canvas, ...]
    tokens_max: int
    conversation: ConversationRequest | None = None
    grammar: GrammarSpec | None = None


class ChatCodec:
    """Encodes prompts and decodes answers with one `tokenizer.json`; safe to call from several threads."""

    def __init__(self, tokenizer_json: str, preprocessor: ImagePreprocessor | None = None) -> None:
        """Load a tokenizer from the text of its file. Raises ValueError when it lacks the chat format's tokens."""
        self.tokens = TokenBytes.from_json(tokenizer_json)
        spellings = {spelling: token_id for token_id, spelling in self.tokens.special.items()}
        special = SpecialTokens(image=IMAGE_TOKEN)
        wanted = {name: special.token(getattr(SpecialToken, name)) for name in _REQUIRED}
        missing = sorted(spelling for spelling in wanted.values() if spelling not in spellings)
        if missing:
            raise ValueError(f"tokenizer.json: added tokens lack {missing}; declare them as special")
        self.eos_token_id = spellings[wanted["Eos"]]
        self.image_token_id = spellings.get(IMAGE_TOKEN)
        self._thinking_end = spellings[wanted["ThinkingEnd"]]
        self._markers = {spellings[wanted[name]] for name in ("ThinkingStart", "ThinkingEnd", "Dsml")}
        self._preprocessor = preprocessor
        self._options = (
            ConversionOptions().with_model_alias(_ALIAS, ModelVersion.DeepseekV41Flash).with_special_tokens(special)
        )
        encoding = DeepseekV41Encoding().with_special_tokens(special)
        self._bos_token_id = spellings[wanted["Bos"]]
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._encoding = encoding.with_tokenizer(self._tokenizer)

    @classmethod
    def from_file(cls, path: Path, preprocessor: ImagePreprocessor | None = None) -> "ChatCodec":
        """Load the tokenizer of a checkpoint directory or a `tokenizer.json`; TokenizerError if it cannot be used."""
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(path.read_text(encoding="utf-8"), preprocessor)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise TokenizerError(f"{path}: not a tokenizer that can be used: {error}") from error

    def encode(self, body: ChatBody, settings: ApiSettings) -> Prompt:
        """Render and tokenise a request. Raises BadRequestError or PromptTooLongError.

        May take milliseconds, and seconds for the first one in a process whose answer must have a form.
        """
        check_form(body)
        messages, images = self._images(body.messages, settings)
        conversation = self._convert(body, messages, settings)
        stage = conversation.parsing_options.thinking_initial_stage
        is_thinking = stage is not None and stage.starts_in_reasoning()
        grammar = grammar_of(body, self._thinking_end if is_thinking else None)
        rendered = self._encoding.render_conversation(conversation.conversation)
        order = [_image_number(source.data_url) for source in rendered.image_sources]
        token_ids: list[int] = self._encoding.encode(conversation.conversation)
        expanded, spans = self._expand(token_ids, [images[i] for i in order])
        tokens_max = _resolve_tokens_max(body, conversation, len(expanded), settings.context_tokens)
        canvases = tuple(images[i].canvas for i in order)
        return Prompt(tuple(expanded), spans, canvases, tokens_max, conversation, grammar)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text to continue, behind BOS as vLLM has it; spellings of special tokens are those tokens."""
        ids: list[int] = self._tokenizer.encode(text)
        return tuple(ids) if ids[:1] == [self._bos_token_id] else (self._bos_token_id, *ids)

    def decoder(self, prompt: Prompt) -> tuple[Detokeniser, Splitter]:
        """Fresh state to decode one answer to this prompt."""
        if prompt.conversation is None:
            return Detokeniser(self.tokens), PlainSplitter()
        options = prompt.conversation.parsing_options
        if options.thinking_initial_stage is None and not options.parse_tool_calls:
            return Detokeniser(self.tokens), PlainSplitter()
        return Detokeniser(self.tokens, shown=self._markers), RecipeSplitter(prompt.conversation, self._thinking_end)

    def _convert(self, body: ChatBody, messages: list[dict[str, Any]], settings: ApiSettings) -> ConversationRequest:
        """Let deepseek-recipe check the conversation; its refusals become ours."""
        request = {
            "model": _ALIAS,
            "messages": messages,
            "thinking": {"type": "enabled" if _is_thinking(body, settings) else "disabled"},
        }
        for name in ("tools", "tool_choice", "reasoning_effort"):
            if (value := getattr(body, name)) is not None:
                request[name] = value
        if body.response_format is not None:
            request["response_format"] = _shown_format(body.response_format)
        try:
            return ChatCompletionRequest(request).convert(self._options)
        except ConversionError as error:
            raise BadRequestError(_recipe_message(error), param="messages", code="invalid_value") from error
        except RecursionError as error:  # deepseek-recipe's own limit, 128 levels
            raise BadRequestError("the body is nested too deeply", code="invalid_json") from error
        except ValueError as error:
            raise BadRequestError(str(error), param="messages", code="invalid_value") from error

    def _images(
        self, messages: Sequence[dict[str, Any]], settings: ApiSettings
    ) -> tuple[list[dict[str, Any]], list[PreparedImage]]:
        """Prepare every image; in the returned messages a short numbered URL stands in for each."""
        limits = ImageLimits(settings.image_bytes_max, settings.image_pixels_max)
        images: list[PreparedImage] = []
        out = []
        for i, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list):
                content = list(content)
                for j, part in enumerate(content):
                    if part["type"] == "image_url":
                        param = f"messages[{i}].content[{j}].image_url"
                        self._check_image_count(len(images) + 1, settings.images_max, param)
                        images.append(self._prepare(part["image_url"]["url"], limits, param))
                        content[j] = {"type": "image_url", "image_url": {"url": _image_stub(len(images) - 1)}}
                message = {**message, "content": content}
            out.append(message)
        return out, images

    def _check_image_count(self, count: int, images_max: int, param: str) -> None:
        if self._preprocessor is None or self.image_token_id is None:
            raise BadRequestError(f"{param}: this model takes no images", param=param, code="invalid_image")
        if count > images_max:
            raise BadRequestError(f"{param}: more than {images_max} images", param=param, code="too_many_images")

    def _prepare(self, url: str, limits: ImageLimits, param: str) -> PreparedImage:
        assert self._preprocessor is not None, "checked with the image count"
        return self._preprocessor.prepare(decode_image_url(url, limits, param))

    def _expand(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace each placeholder by its span. Only rendering makes the id: text spelling it is plain text."""
        if not images:
            return list(token_ids), ()
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        for token_id in token_ids:
            if token_id != self.image_token_id:
                expanded.append(token_id)
                continue
            assert len(spans) < len(images), "more placeholders than images"
            image = images[len(spans)]
            length = image.grid_rows * (image.grid_columns + 1) + 2  # model-v41.md section 8: newlines, start, end
            spans.append(ImageSpan(len(expanded), length, image.grid_rows, image.grid_columns, image.digest))
            expanded += [token_id] * length
        assert len(spans) == len(images), f"{len(spans)} placeholders for {len(images)} images"
        return expanded, tuple(spans)


_REQUIRED = ("Bos", "Eos", "ThinkingStart", "ThinkingEnd", "System", "User", "Assistant", "LatestReminder", "Dsml")


def _is_thinking(body: ChatBody, settings: ApiSettings) -> bool:
    if body.thinking is not None:
        return body.thinking.type == "enabled"
    options = body.chat_template_kwargs
    for wish in (options.thinking, options.enable_thinking) if options else ():
        if wish is not None:
            return wish
    return settings.thinking_default


def _resolve_tokens_max(body: ChatBody, conversation: ConversationRequest, prompt: int, context: int) -> int:
    """The output limit; an unspecified one is deepseek-recipe's default, lowered to what the context leaves."""
    if prompt >= context:
        raise PromptTooLongError(f"messages: the prompt has {prompt} tokens, the context holds {context}; shorten it")
    wanted = body.tokens_max
    if wanted is None:
        resolved: int = conversation.resolve_max_tokens(prompt, context)
        return resolved
    if prompt + wanted > context:
        raise PromptTooLongError(
            f"messages: {prompt} prompt tokens plus {wanted} output tokens exceed the context of {context}; "
            f"shorten the prompt or set max_tokens to at most {context - prompt}"
        )
    return wanted


def _shown_format(response_format: dict[str, Any]) -> dict[str, Any]:
    """The format as it is told to the model; that it is strict is a matter of the grammar, not of the prompt."""
    schema = response_format.get("json_schema")
    if not isinstance(schema, dict):
        return response_format
    return {**response_format, "json_schema": {**schema, "strict": None}}


def _image_stub(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(str(number).encode()).decode()}"


def _image_number(stub: str | None) -> int:
    assert stub is not None, "every image was replaced by a data URL"
    return int(base64.b64decode(stub.rpartition(",")[2]))


def _recipe_message(error: ConversionError) -> str:
    """The text inside deepseek-recipe's error object, which is not passed on as an object inside another."""
    try:
        return str(msgspec.json.decode(error.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error)
