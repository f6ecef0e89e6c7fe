"""Conversations over several tasks: samples one after another, and a system turn before those that have none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shoal.engines.toy.tasks.chat import SYSTEMS
from shoal.engines.toy.tasks.sample import Sample


def in_one_conversation(samples: Sequence[Sample]) -> Sample:
    """The last sample, after the conversations of those before it with their wanted answers.

    Raises ValueError for samples that only stand alone: documents, and those with tools, a format or thoughts.
    """
    messages: list[Mapping[str, Any]] = []
    images: list[NDArray[np.uint8]] = []
    for i, sample in enumerate(samples):
        if sample.document or sample.tools or sample.response_format is not None or sample.thinking:
            raise ValueError(f"samples[{i}] is of {sample.task} and stands alone; join plain conversations only")
        messages += [message for message in sample.messages if message["role"] != "system"]
        messages.append({"role": "assistant", "content": sample.wanted.text})
        images += sample.images
    return replace(samples[-1], messages=tuple(messages[:-1]), images=tuple(images))


def with_system(dice: Random, sample: Sample) -> Sample:
    """The sample with a polite system turn, if it has none; a document stays as it is."""
    if sample.document or sample.messages[0]["role"] == "system":
        return sample
    system = {"role": "system", "content": dice.choice(SYSTEMS)}
    return replace(sample, messages=(system, *sample.messages))
