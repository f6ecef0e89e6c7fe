"""The toy's kept tokenizer: its layout, its words, and that training is repeatable."""

from pathlib import Path

import pytest
from shoal.engines.toy.text import corpus, task_words
from shoal.engines.toy.tokenizer import (
    IMAGE,
    IMAGE_ID,
    NOISE_ID,
    VOCAB,
    main,
    special_tokens,
    tokenizer_text,
    toy_tokenizer,
    train_tokenizer,
)


def test_the_kept_tokenizer_has_the_layout() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB == 2048
    assert {i: tokenizer.id_to_token(i) for i in special_tokens()} == special_tokens()
    assert (tokenizer.token_to_id(IMAGE), IMAGE_ID, NOISE_ID) == (2032, 2032, 2024)


@pytest.mark.parametrize("text", ["  The code is 4821.\n\n\tif x:", "Ångström ｜ naïve 魚 🐟", '{"a": [1, 23.5]}'])
def test_any_text_comes_back(text: str) -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tasks_words_and_single_digits_are_tokens() -> None:
    tokenizer = toy_tokenizer()
    assert [w for w in task_words() if len(tokenizer.encode(f" {w}").ids) != 1] == []
    assert [tokenizer.decode([i]) for i in tokenizer.encode("4821x07").ids] == ["4", "8", "2", "1", "x", "0", "7"]


def test_training_is_repeatable(tmp_path: Path) -> None:
    """The command draws the same text and counts it alike."""
    assert main([str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_text(encoding="utf-8") == tokenizer_text(train_tokenizer(corpus()))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the layout needs 2024; give more text"):
        train_tokenizer(["a few words"])


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
