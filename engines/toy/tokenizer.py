"""The toy tokenizer: byte-level BPE of 1024 ids with the chat format's special tokens, trained in a moment.

Encoding a chat with it is what the released tokenizer needs too. The image placeholder is spelt otherwise than
deepseek-recipe's default, so both its front end and its encoder must be told, and the placeholder's id is
`image_token_id` of config.json, never deepseek-recipe's constant; one id stands for a whole image span:

    special = SpecialTokens(image=IMAGE)
    options = ConversionOptions().with_special_tokens(special)
    conversation = ChatCompletionRequest(body).convert(options).conversation
    encoding = DeepseekV41Encoding().with_special_tokens(special)
    ids = encoding.with_tokenizer(Tokenizer.from_file(f"{directory}/tokenizer.json")).encode(conversation)
"""

from shoal.engines.toy.text import corpus
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 1024
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids of the tokens that the configuration names; the rest of the chat format lies between them.
NOISE_ID = 1000
IMAGE_ID = 1008
IMAGE = "<｜deepseek_image｜>"
CHAT = (
    "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜", IMAGE,
)  # fmt: skip


def special_tokens() -> dict[int, str]:
    """Every added token by id: BOS, EOS and pad first, then from NOISE_ID on placeholders around the chat tokens."""
    late = [_placeholder(0), *CHAT]
    late += [_placeholder(i) for i in range(1, VOCAB - NOISE_ID - len(late) + 1)]
    return dict(enumerate((BOS, EOS, PAD))) | dict(enumerate(late, start=NOISE_ID))


def train_tokenizer() -> Tokenizer:
    """The tokenizer; equal on every machine (training is a count over the text of this folder)."""
    specials = special_tokens()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    early = [AddedToken(specials[i], special=True, normalized=False) for i in range(3)]
    trainer = trainers.BpeTrainer(
        vocab_size=NOISE_ID,
        min_frequency=1,
        special_tokens=early,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    found = tokenizer.get_vocab_size()
    assert found == NOISE_ID, f"the text gives {found} ids, the layout needs {NOISE_ID}: lengthen the text"
    late = [AddedToken(specials[i], special=True, normalized=False) for i in range(NOISE_ID, VOCAB)]
    tokenizer.add_special_tokens(late)
    assert tokenizer.token_to_id(IMAGE) == IMAGE_ID, "the image token must have the id that config.json names"
    return tokenizer


def _placeholder(number: int) -> str:
    return f"<｜place▁holder▁no▁{number}｜>"
