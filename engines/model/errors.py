"""What a checkpoint or an image can be wrong about: each error names the field, the value, the rule and the remedy."""


class CheckpointError(ValueError):
    """A checkpoint directory cannot be served as it is."""


class ConfigError(CheckpointError):
    """`config.json` breaks a rule of the architecture."""

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(f"config.json: {field} = {value!r}: {rule}; {remedy}")
        self.field = field


class WeightsError(CheckpointError):
    """The tensors of a checkpoint do not match its configuration, or its files cannot be read."""


class TokenizerError(CheckpointError):
    """The tokenizer and the configuration describe different vocabularies."""


class ImageError(ValueError):
    """A picture cannot become patches: the text says what was given and what is needed."""
