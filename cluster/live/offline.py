"""One chat through a NORMAL engine of this process: what `shoal generate` prints."""

import secrets
from collections.abc import Iterator
from pathlib import Path

from shoal.cluster.api.body import ChatBody
from shoal.cluster.api.codec import ChatCodec
from shoal.cluster.api.errors import ApiError
from shoal.cluster.api.settings import ApiSettings
from shoal.cluster.errors import ShoalError
from shoal.cluster.live.facts import model_directory
from shoal.engines.core.request import FinishEvent, SamplingParams, TokensEvent
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.errors import ConfigError, WeightsError
from shoal.engines.run.generate import generate


def generate_text(
    model: str, text: str, max_tokens: int, temperature: float, seed: int | None, drafts: int = 0
) -> Iterator[str]:
    """Pieces of the answer as they are computed. Raises ShoalError for a prompt or checkpoint that cannot be used."""
    directory = Path(model_directory(model))
    try:
        limit = ModelConfig.from_dir(directory).text.max_position_embeddings
        codec = ChatCodec.from_file(directory)
    except (ConfigError, WeightsError, OSError) as error:
        raise ShoalError(f"{directory}: {error}") from error
    body = ChatBody(model=model, messages=[{"role": "user", "content": text}], max_tokens=max_tokens)
    try:
        prompt = codec.encode(body, ApiSettings(context_tokens=limit, thinking_default=False))
    except ApiError as error:
        raise ShoalError(error.message) from error
    sampling = SamplingParams(
        temperature=temperature, max_tokens=prompt.tokens_max, seed=secrets.randbits(63) if seed is None else seed
    )
    detokeniser, _ = codec.decoder(prompt)
    for event in generate(directory, prompt.token_ids, sampling, drafts):
        if isinstance(event, TokensEvent):
            yield detokeniser.push(tuple(one for one in event.token_ids if one != codec.eos_token_id))
        elif isinstance(event, FinishEvent):
            yield detokeniser.finish()
