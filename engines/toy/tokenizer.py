"""The toy tokenizer: byte-level BPE of 2048 ids with the chat format's special tokens, kept beside the weights.

`python -m shoal.engines.toy.tokenizer FILE` trains it anew. The text it is trained on holds parts of the standard
library, which differ between Python versions, and weights belong to one tokenizer only: so the file is kept.

Encoding a chat with it is what the released tokenizer needs too. The image placeholder is spelt otherwise than
deepseek-recipe's default, so both its front end and its encoder must be told, and the placeholder's id is
`image_token_id` of config.json, never deepseek-recipe's constant; one id stands for a whole image span:

    special = SpecialTokens(image=IMAGE)
    options = ConversionOptions().with_special_tokens(special)
    conversation = ChatCompletionRequest(body).convert(options).conversation
    encoding = DeepseekV41Encoding().with_special_tokens(special)
    ids = encoding.with_tokenizer(Tokenizer.from_file(f"{directory}/tokenizer.json")).encode(conversation)
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 2048
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids of the tokens that the configuration names; the rest of the chat format lies between them.
NOISE_ID = 2024
IMAGE_ID = 2032
IMAGE = "<｜deepseek_image｜>"
CHAT = (
    "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜", IMAGE,
)  # fmt: skip
TOKENIZER_FILE = Path(__file__).parent / "weights" / "tokenizer.json"
USAGE = "usage: python -m shoal.engines.toy.tokenizer FILE   (trains the toy tokenizer and writes its tokenizer.json)"


def special_tokens() -> dict[int, str]:
    """Every added token by id: BOS, EOS and pad first, then from NOISE_ID on placeholders around the chat tokens."""
    late = [_placeholder(0), *CHAT]
    late += [_placeholder(i) for i in range(1, VOCAB - NOISE_ID - len(late) + 1)]
    return dict(enumerate((BOS, EOS, PAD))) | dict(enumerate(late, start=NOISE_ID))


def toy_tokenizer() -> Tokenizer:
    """The tokenizer that belongs to the toy's weights."""
    return Tokenizer.from_file(str(TOKENIZER_FILE))


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """What divides a text into words, single digits, marks and white space before these become tokens."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def train_tokenizer(lines: Iterable[str]) -> Tokenizer:
    """A tokenizer of the toy's layout for such text; digits are tokens of their own, so numbers are read by digit.

    Raises ValueError when the text is too little for the wanted number of ids.
    """
    specials = special_tokens()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = word_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    early = [AddedToken(specials[i], special=True, normalized=False) for i in range(3)]
    trainer = trainers.BpeTrainer(
        vocab_size=NOISE_ID,
        min_frequency=1,
        special_tokens=early,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    found = tokenizer.get_vocab_size()
    if found != NOISE_ID:
        raise ValueError(f"lines give {found} ids, the layout needs {NOISE_ID}; give more text")
    late = [AddedToken(specials[i], special=True, normalized=False) for i in range(NOISE_ID, VOCAB)]
    tokenizer.add_special_tokens(late)
    assert tokenizer.token_to_id(IMAGE) == IMAGE_ID, "the image token must have the id that config.json names"
    return tokenizer


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """The content of a tokenizer's tokenizer.json."""
    return str(tokenizer.to_str(pretty=True)) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file that is named; 2 for wrong usage."""
    from shoal.engines.toy.text import corpus  # the tasks' text: only training needs it

    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(tokenizer_text(train_tokenizer(corpus())), encoding="utf-8")
    return 0


def _placeholder(number: int) -> str:
    return f"<｜place▁holder▁no▁{number}｜>"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
