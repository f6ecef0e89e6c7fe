"""Replays matcher scenarios: triggers, bounds and rollback over a grammar that refuses some ids."""

from typing import Any

import numpy as np
from shoal.engines.core.golden.outcome import differences
from shoal.engines.core.grammar.matcher import Mask, Matcher
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec

VOCABULARY = 96
ROLLBACK_MAX = 8


class StubGrammar:
    """Allows every id but `rejects`, which is the schema's stub."""

    def __init__(self, rejects: list[int]) -> None:
        self._rejects = frozenset(rejects)
        self.accepted = 0

    def accept(self, token_id: int) -> bool:
        """Whether the id is none of the refused ones."""
        if token_id in self._rejects:
            return False
        self.accepted += 1
        return True

    def rollback(self, tokens: int) -> None:
        """Count back."""
        self.accepted -= tokens

    def allowed(self) -> Mask:
        """All but the refused."""
        bits = np.ones(VOCABULARY, np.uint8)
        bits[list(self._rejects)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def copy(self) -> "StubGrammar":
        """The same refusals and count."""
        copied = StubGrammar(sorted(self._rejects))
        copied.accepted = self.accepted
        return copied


def replay_matcher(entry: dict[str, Any]) -> list[str]:
    """Accept or roll back as the scenario says and compare every field after each operation."""
    config = entry["config"]
    grammar = StubGrammar(config["grammar_rejects"])
    spec = GrammarSpec(GrammarKind.EBNF, "", tuple(config["trigger"]), config["bound"], must_begin=False)
    matcher = Matcher(grammar, spec, config["eos"], VOCABULARY, ROLLBACK_MAX)
    found: list[str] = []
    for index, operation in enumerate(entry["ops"]):
        got: dict[str, Any] = {}
        if "accept" in operation:
            got = {"accept": operation["accept"], "result": matcher.accept(operation["accept"])}
        else:
            matcher.rollback(operation["rollback"])
            got = {"rollback": operation["rollback"]}
        got |= {
            "trigger_progress": matcher.trigger_progress,
            "constrained": matcher.is_constrained,
            "finished": matcher.is_ended,
            "in_grammar": grammar.accepted,
        }
        found += differences(operation, got, f"op {index}")
    return found
