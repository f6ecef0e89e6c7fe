"""Detokenising and stop strings: any cut of any token stream gives the same text, and no stop string leaks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.cluster.api.streaming import Detokeniser, StopMatcher
from shoal.engines.grammar.token_bytes import TokenBytes
from tokenizers import Tokenizer

ORACLE = Path(__file__).parents[2] / "data" / "oracle" / "tokenizer.json"
TOKENS = TokenBytes.from_json(ORACLE.read_text())
REFERENCE = Tokenizer.from_file(str(ORACLE))


def cut(items, sizes):
    """Split `items` at the cumulated sizes."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(items[at : at + size])
        at += size
    return [*pieces, items[at:]]


ids = st.lists(st.integers(0, 1023), max_size=60)
sizes = st.lists(st.integers(0, 7), max_size=30)


@given(ids, sizes)
def test_any_cut_of_any_tokens_gives_the_one_shot_text(token_ids, cuts):
    detokeniser = Detokeniser(TOKENS)
    text = "".join(detokeniser.push(piece) for piece in cut(token_ids, cuts)) + detokeniser.finish()
    assert text == REFERENCE.decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=40), sizes)
def test_text_comes_back_without_replacement_characters(text, cuts):
    token_ids = REFERENCE.encode(text, add_special_tokens=False).ids
    detokeniser = Detokeniser(TOKENS, shown=TOKENS.special)
    pieces = [detokeniser.push(piece) for piece in cut(token_ids, cuts)]
    assert "".join(pieces) == text
    assert detokeniser.finish() == ""


def test_an_emoji_arrives_whole_and_an_unfinished_one_is_one_replacement_character():
    by_byte = {TOKENS.of(i): i for i in range(1000)}
    emoji = [by_byte[bytes([byte])] for byte in "🐟".encode()]
    detokeniser = Detokeniser(TOKENS)
    assert [detokeniser.push([i]) for i in emoji] == ["", "", "", "🐟"]
    assert detokeniser.push(emoji[:3]) == ""
    assert detokeniser.finish() == "�"


def test_special_tokens_are_silent_unless_they_are_shown():
    think = next(i for i, spelling in TOKENS.special.items() if spelling == "</think>")
    assert Detokeniser(TOKENS).push([think, 1]) == ""
    assert Detokeniser(TOKENS, shown={think}).push([think, 1]) == "</think>"


def test_ids_beyond_the_tokenizer_are_silent():
    assert Detokeniser(TOKENS).push([5000]) == ""


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    with pytest.raises(ValueError, match="must be ByteLevel"):
        TokenBytes.from_json('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}')


def one_shot(text, stops):
    """The rule said plainly: grow the text a character at a time until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab", max_size=40)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), sizes)
def test_stop_strings_cut_at_the_same_place_however_the_text_arrives(text, stops, cuts):
    matcher, shown = StopMatcher(stops), ""
    expected, stop = one_shot(text, stops)
    for piece in cut(text, cuts):
        shown += matcher.push(piece)
        assert expected.startswith(shown), "a part of a stop string was shown"
    if matcher.matched is None:
        shown += matcher.finish()
    assert (shown, matcher.matched, matcher.emitted) == (expected, stop, len(expected))


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.push("hello E") == "hello "
    assert matcher.held == 1
    assert matcher.push("gg") == "Egg"
