"""Engram's row numbers: token classes, hash constants, and the table rows of a batch of tokens.

Source: official engram.py and the published configuration (the check values are in the tests).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from shoal.engines.model.config import ModelConfig, TextConfig
from shoal.engines.model.errors import ConfigError, TokenizerError
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

INT64_MAX = (1 << 63) - 1
SEED_FACTOR = 10007
# A lone space must survive the strip: it hides behind a private-use character meanwhile.
SENTINEL = "\ue000"
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class HashConstants:
    """Per Engram layer: odd multipliers [n], and prime and first table row of each column [(n - 1) * heads]."""

    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class EngramHash:
    """What turns token ids into table rows; all tensors int64 on one device.

    class_of: [vocab]; multipliers: [layers, n]; primes, offsets: [layers, columns] with columns ordered by n-gram
    size from 2 up, then head.
    """

    class_of: Tensor
    pad_class: int
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def from_dir(cls, directory: Path, config: ModelConfig) -> "EngramHash":
        """The hash of the checkpoint in `directory`, from its tokenizer.json; raises TokenizerError, ConfigError."""
        return cls.build(config, class_map(read_tokenizer(directory)))

    @classmethod
    def build(cls, config: ModelConfig, classes: NDArray[np.int32]) -> "EngramHash":
        """The hash for the token classes of a tokenizer, [vocab]; raises TokenizerError, ConfigError."""
        text = config.text
        if len(classes) != text.vocab_size:
            raise TokenizerError(
                f"tokenizer.json has {len(classes)} ids, config.json vocab_size = {text.vocab_size}: "
                "they must be equal; use the tokenizer shipped with the checkpoint"
            )
        count = int(classes.max()) + 1
        if count != text.engram_compressed_vocab_size:
            raise TokenizerError(
                f"tokenizer.json compresses to {count} classes, config.json engram_compressed_vocab_size = "
                f"{text.engram_compressed_vocab_size}: they must be equal; use the checkpoint's own tokenizer"
            )
        constants = hash_constants(text)
        columns = text.engram_columns
        return cls(
            class_of=torch.from_numpy(classes.astype(np.int64)),
            pad_class=int(classes[text.engram_pad_token_id]),
            multipliers=torch.tensor(constants.multipliers, dtype=torch.int64).view(-1, text.engram_max_ngram_size),
            primes=torch.tensor(constants.primes, dtype=torch.int64).view(-1, columns),
            offsets=torch.tensor(constants.offsets, dtype=torch.int64).view(-1, columns),
        )

    @property
    def lookback(self) -> int:
        """Tokens before a chunk that its rows depend on."""
        return self.multipliers.shape[1] - 1

    def rows(self, token_ids: Tensor, image_mask: Tensor, q_lens: Sequence[int], lookback: Tensor) -> Tensor:
        """Table rows, offsets included: int64 [tokens, Engram layers, columns].

        token_ids: int64 [tokens], the chunks of all sequences concatenated; image_mask: bool [tokens], image spans
        with their delimiters; q_lens: tokens of each sequence; lookback: int64 [sequences, n - 1], the raw ids
        before each chunk, nearest first, -1 = before the start of the sequence, or in an image span.
        Raises ValueError when the shapes disagree or an id is outside the vocabulary.
        """
        self._check(token_ids, image_mask, q_lens, lookback)
        device, depth = token_ids.device, self.lookback
        lens = torch.tensor(q_lens, dtype=torch.int64, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(q_lens), device=device), lens)
        # One line of ids: every sequence's look-back, then its chunk.
        place = torch.arange(len(token_ids), device=device) + depth * (sequence + 1)
        line = torch.empty(len(token_ids) + depth * len(q_lens), dtype=torch.int64, device=device)
        line[place] = torch.where(image_mask, -1, token_ids)
        starts = torch.cumsum(lens, 0) - lens + depth * torch.arange(len(q_lens), device=device)
        line[starts[:, None] + torch.arange(depth, device=device)] = lookback.flip(1)
        line_class = torch.where(line < 0, -1, self.class_of[line.clamp(min=0)])
        return self._hash(line_class, place)

    def _hash(self, line_class: Tensor, place: Tensor) -> Tensor:
        # An image token, or the start of the sequence, hides everything before it: `hidden` only ever grows.
        hidden = torch.zeros(len(place), dtype=torch.bool, device=place.device)
        roll = torch.zeros(len(place), self.multipliers.shape[0], dtype=torch.int64, device=place.device)
        rolls = []
        for back in range(self.lookback + 1):
            token_class = line_class[place - back]
            hidden = hidden | (token_class < 0)
            token_class = torch.where(hidden, self.pad_class, token_class)
            roll = roll ^ (token_class[:, None] * self.multipliers[:, back])
            rolls.append(roll)
        heads = self.primes.shape[1] // self.lookback
        grams = torch.stack(rolls[1:], dim=-1).repeat_interleave(heads, dim=-1)
        return grams % self.primes + self.offsets

    def _check(self, token_ids: Tensor, image_mask: Tensor, q_lens: Sequence[int], lookback: Tensor) -> None:
        tokens, vocab = sum(q_lens), len(self.class_of)
        if token_ids.shape != (tokens,) or image_mask.shape != (tokens,) or image_mask.dtype != torch.bool:
            raise ValueError(
                f"token_ids {tuple(token_ids.shape)} and image_mask {tuple(image_mask.shape)} {image_mask.dtype} "
                f"must be [{tokens}] (the sum of q_lens) and bool"
            )
        if lookback.shape != (len(q_lens), self.lookback):
            raise ValueError(f"lookback {tuple(lookback.shape)} must be [{len(q_lens)}, {self.lookback}]")
        if tokens and not bool(((token_ids >= 0) & (token_ids < vocab)).all()):
            raise ValueError(f"token_ids must be in [0, {vocab})")
        if lookback.numel() and not bool(((lookback >= -1) & (lookback < vocab)).all()):
            raise ValueError(f"lookback must be in [-1, {vocab})")


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a checkpoint directory; raises TokenizerError."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: is missing; use the tokenizer shipped with the checkpoint")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for every parse error
        raise TokenizerError(f"{path}: cannot be read ({error}); download it again") from error


def class_map(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The class of every id, int32 [vocab]: ids whose texts normalise alike share one, numbered as first seen."""
    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(SENTINEL, " "),
        ]
    )
    seen: dict[str, int] = {}
    classes = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int32)
    for token_id in range(len(classes)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normaliser.normalize_str(text) or text
        classes[token_id] = seen.setdefault(key, len(seen))
    return classes


def hash_constants(text: TextConfig) -> HashConstants:
    """Multipliers, primes and offsets of every Engram layer.

    Raises ConfigError when the tables of the configuration have another number of rows.
    """
    bound = max(1, (INT64_MAX // text.engram_compressed_vocab_size) // 2)
    multipliers, primes, offsets = [], [], []
    pool = primes_from(text.engram_vocab_size, len(text.engram_layer_ids) * text.engram_columns)
    for index, layer in enumerate(text.engram_layer_ids):
        random = np.random.default_rng(SEED_FACTOR * layer)
        drawn = random.integers(0, bound, size=text.engram_max_ngram_size, dtype=np.int64) * 2 + 1
        multipliers.append(tuple(int(m) for m in drawn))
        # Every search restarts at the same number and skips primes in use: together, consecutive primes.
        own = tuple(pool[index * text.engram_columns : (index + 1) * text.engram_columns])
        primes.append(own)
        offsets.append(tuple(sum(own[:column]) for column in range(len(own))))
        if sum(own) != text.engram_num_embeddings[index]:
            raise ConfigError(
                f"text_config.engram_num_embeddings[{index}]",
                text.engram_num_embeddings[index],
                f"must be {sum(own)}, the sum of the layer's primes",
                "use the checkpoint's own config",
            )
    return HashConstants(tuple(multipliers), tuple(primes), tuple(offsets))


def primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are at least `start`, ascending (a sieve over one short interval)."""
    found: list[int] = []
    low = max(start, 2)
    while len(found) < count:
        # Primes near x are about ln x apart; a short interval is simply searched again from its end.
        high = low + max(64, 2 * (count - len(found)) * max(1, int(np.log(low))))
        sieve = np.ones(high - low, dtype=bool)
        for factor in range(2, int(high**0.5) + 1):
            first = max(factor * factor, -(-low // factor) * factor)
            sieve[first - low :: factor] = False
        found += [low + int(i) for i in np.flatnonzero(sieve)]
        low = high
    return found[:count]
