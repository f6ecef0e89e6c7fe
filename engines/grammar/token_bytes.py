"""The bytes of every token of a byte-level tokenizer, from its `tokenizer.json`."""

import json
from dataclasses import dataclass
from typing import Any


def byte_level_alphabet() -> dict[str, int]:
    """Map each character of a byte-level BPE vocabulary to the byte it stands for.

    Source: the byte-to-unicode table of GPT-2, which Hugging Face's ByteLevel uses: printable Latin-1 bytes stand
    for themselves, the other 68 take the characters from U+0100 on, in byte order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _decoder_types(decoder: Any) -> set[str]:
    """Every decoder type named in a tokenizer.json's decoder, sequences flattened."""
    if not isinstance(decoder, dict):
        return set()
    inner: set[str] = set().union(*map(_decoder_types, decoder.get("decoders", ())))
    return inner | {str(decoder.get("type"))}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token id of one byte-level tokenizer; `special` ids are markup, not text.

    `pieces[id]` is empty for ids without a token (a model's vocabulary may be padded beyond its tokenizer's).
    """

    pieces: tuple[bytes, ...]
    special: dict[int, str]

    @classmethod
    def from_json(cls, text: str) -> "TokenBytes":
        """Read a `tokenizer.json`. Raises ValueError when its decoder is not byte-level."""
        tree = json.loads(text)
        types = _decoder_types(tree.get("decoder"))
        if "ByteLevel" not in types:
            raise ValueError(f"tokenizer.json: decoder is {sorted(types)}, must be ByteLevel; use a byte-level BPE")
        alphabet = byte_level_alphabet()
        vocabulary: dict[str, int] = tree["model"]["vocab"]
        added = {int(entry["id"]): entry for entry in tree.get("added_tokens", ())}
        pieces = [b""] * (1 + max([*vocabulary.values(), *added]))
        for token, token_id in vocabulary.items():
            pieces[token_id] = _piece(token, alphabet)
        for token_id, entry in added.items():
            pieces[token_id] = _piece(entry["content"], alphabet)
        return cls(tuple(pieces), {i: str(entry["content"]) for i, entry in added.items() if entry["special"]})

    def of(self, token_id: int) -> bytes:
        """Bytes of one token, markup included."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


def _piece(token: str, alphabet: dict[str, int]) -> bytes:
    """A token's bytes; one with a character outside the alphabet is literal text, as ByteLevel decodes it."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()
