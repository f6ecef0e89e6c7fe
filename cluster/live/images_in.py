"""Embeddings on their way from an encoder into an engine."""

import asyncio
import logging
from typing import Any

import torch
from ray.exceptions import RayError
from shoal.balancers.reports import GroupRef
from shoal.cluster.core.messages import EmbeddingLost
from shoal.cluster.live.submission import ImageRef, Origin

log = logging.getLogger(__name__)

READ_S = 30.0


async def image_rows(image: ImageRef, origin: Origin, group: GroupRef) -> torch.Tensor | EmbeddingLost:
    """The image's rows, bfloat16 [span length, hidden], or the letter that says they cannot be read."""
    reference: Any = image.rows
    try:
        bits = await asyncio.wait_for(reference, timeout=READ_S)
    except (RayError, TimeoutError) as error:
        log.warning("embedding of image %d of %s: %s", image.image_index, origin.request_id, type(error).__name__)
        return EmbeddingLost(origin.attempt, group, image.image_index)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)
