"""One process's examination room: the checkpoint loaded once, samples made, answered and judged."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shoal.engines.model.decoder import Model
from shoal.engines.model.numerics import Mode
from shoal.engines.run.vision import VisionRunner
from shoal.engines.toy.evaluate.choice import Greedy, Sampled
from shoal.engines.toy.evaluate.drafting import Answered, CachedSpeculator, speculate
from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.evaluate.papers import paper
from shoal.engines.toy.evaluate.sitting import TRUNCATION, Question, question_of, sit
from shoal.engines.toy.tasks.encoding import Codec, decode_answer, encode
from shoal.engines.toy.tasks.mixture import examination_random
from shoal.engines.toy.tasks.sample import Sample
from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Room:
    """A checkpoint's model with its drafter, its vision tower, and the codec of its tokenizer."""

    model: Model
    vision: VisionRunner
    codec: Codec

    @staticmethod
    @cache
    def open(directory: Path, mode: Mode) -> "Room":
        """The room of a checkpoint, loaded once a process; raises CheckpointError."""
        model = Model.load(directory, mode)
        codec = Codec.of(Tokenizer.from_file(str(directory / "tokenizer.json")))
        codec = dataclasses.replace(codec, vision=model.config.vision)
        return Room(model, VisionRunner.load(directory), codec)

    def samples(self, name: str, seed: int, indices: Sequence[int]) -> list[Sample]:
        """A paper's samples: a function of seed and index."""
        return [paper(name).generate(examination_random(seed, index)) for index in indices]

    def questions(self, samples: Sequence[Sample]) -> list[Question]:
        """What the service would compute for the samples."""
        return [question_of(encode(sample, self.codec), self.model.config, self.vision) for sample in samples]

    def answer(self, samples: Sequence[Sample], loss: Loss | None) -> tuple[tuple[int, ...], ...]:
        """Output tokens of an engine without drafts."""
        return sit(dataclasses.replace(self.model, drafter=None), self.questions(samples), loss)

    def judge(self, sample: Sample, output: Sequence[int]) -> tuple[bool, bool]:
        """Whether an output is right, and whether it is well-formed."""
        answer = decode_answer(output, self.codec, sample.thinking)
        return sample.is_right(answer), sample.is_valid(answer)

    def draft(
        self, samples: Sequence[Sample], seed: int, indices: Sequence[int]
    ) -> tuple[tuple[Answered, ...], tuple[Answered, ...]]:
        """Each sample answered with drafts, greedily and at temperature 1."""
        questions = self.questions(samples)
        speculator = CachedSpeculator(self.model, questions, TRUNCATION)
        limits, end = [q.outputs_max for q in questions], self.model.config.eos_token_id
        first = speculator.prefill()
        greedy = speculate(speculator, first, Greedy(), limits, end)
        speculator.restart()
        sampled = speculate(speculator, first, Sampled([(seed, index) for index in indices]), limits, end)
        return greedy, sampled
