"""Limits and choices of the HTTP side, each in one place; the manifest may set any of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the HTTP side accepts and how long it waits.

    `context_tokens` is the longest prompt plus output the engines hold. `thinking_default` is what a request without
    a thinking mode gets (the published API's default is on). `status_grace_s` is how long a streamed request waits
    for a refusal that deserves its own HTTP status before the stream is opened; while nothing comes after that, a
    comment is sent every `keepalive_s`. `token_rules_max` bounds `logit_bias` and `stop_token_ids`. Bodies over
    `inline_body_bytes` are parsed and tokenised in `prepare_threads` threads, at most `prepare_queue_max` at a time.
    `image_pixels_max` is checked against the size an image declares, before decoding. Empty `api_keys` admits
    everyone.
    """

    context_tokens: int
    thinking_default: bool = True
    choices_max: int = 8
    stop_strings_max: int = 16
    stop_string_chars_max: int = 256
    token_rules_max: int = 1024
    top_logprobs_max: int = 20
    body_bytes_max: int = 32 << 20
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    status_grace_s: float = 1.0
    keepalive_s: float = 10.0
    metrics_timeout_s: float = 2.0
    images_max: int = 32
    image_bytes_max: int = 20 << 20
    image_pixels_max: int = 40_000_000
    inline_body_bytes: int = 16 << 10
    prepare_threads: int = 2
    prepare_queue_max: int = 64
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse limits that could admit nothing."""
        for name in ("context_tokens", "choices_max", "body_bytes_max", "prepare_threads", "keepalive_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"api.{name} = {getattr(self, name)} must be positive")
