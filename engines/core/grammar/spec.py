"""What a request asks of its output's form, as a value: the kind of grammar, its text, and where it begins."""

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """How `GrammarSpec.text` is to be read. STRUCTURAL_TAG: text with tagged parts, for tool calls."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The output must match `text`, from its first token or from behind a sequence of trigger tokens.

    Until all of `trigger_token_ids` have been put out in a row the output is free. Once `bound_token_id` was among it,
    the rest of the trigger is forced, token by token. With `must_begin` the free part may not be ended by EOS.
    """

    kind: GrammarKind
    text: str = ""
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None
    must_begin: bool = True

    def __post_init__(self) -> None:
        """Refuse a bound that leads nowhere."""
        if self.bound_token_id is not None and not self.trigger_token_ids:
            raise ValueError(f"bound_token_id = {self.bound_token_id} needs trigger_token_ids, which it would force")
