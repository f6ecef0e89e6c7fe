"""Follows one output through its grammar: free text, trigger, grammar, end; masks for drafts; taking tokens back.

Source: engine runtime notes 12. The grammar itself is a port, so that the bookkeeping runs on any.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from shoal.engines.core.grammar.spec import GrammarSpec

Mask = npt.NDArray[np.int32]  # [ceil(vocabulary / 32)]; bit i % 32 of word i // 32 says that token i is allowed
WORD_BITS = 32


class GrammarError(Exception):
    """A grammar cannot go on, for a reason of its own; only the request that it belongs to is affected."""


class Grammar(Protocol):
    """Where one output is in one compiled grammar. Any method may raise GrammarError."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and nothing changes, if it is not allowed here. EOS ends a complete text."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take the last accepted tokens back."""
        ...

    def allowed(self) -> Mask:
        """Which tokens may come next; a copy."""
        ...

    def copy(self) -> "Grammar":
        """Another one at the same place, on its own from now on."""
        ...


class _Past(NamedTuple):
    """What the bookkeeping was before one token, and whether the grammar has seen that token."""

    progress: int
    is_bound: bool
    is_ended: bool
    is_grammars: bool


class Matcher:
    """One request's output. Tokens are accepted in order; the last `rollback_max` of them can be taken back.

    After EOS everything is allowed (a request that ignores EOS goes on). Not thread safe.
    """

    def __init__(
        self, grammar: Grammar, spec: GrammarSpec, eos_token_id: int, vocabulary: int, rollback_max: int = 2
    ) -> None:
        """`vocabulary`: token ids are below it. `rollback_max`: the step's drafts and two more."""
        self._grammar = grammar
        self._spec = spec
        self._eos = eos_token_id
        self._vocabulary = vocabulary
        self._trigger = spec.trigger_token_ids
        self._border = _borders(self._trigger)
        self._progress = 0
        self._is_bound = False
        self._is_ended = False
        self._past: deque[_Past] = deque(maxlen=rollback_max)
        self.followed = 0  # output tokens accepted by `follow`
        self.failure = ""  # why it cannot go on; "" while it can

    def beginning(self) -> Grammar:
        """A copy of the grammar, which must not have seen a token yet."""
        assert not self.followed, f"the grammar has followed {self.followed} tokens"
        return self._grammar.copy()

    @property
    def trigger_progress(self) -> int:
        """How many of the trigger's tokens were seen last, all of them once the grammar rules."""
        return self._progress

    @property
    def is_constrained(self) -> bool:
        """Whether the next token is forced or ruled by the grammar."""
        return not self._is_ended and (self._in_grammar or self._is_bound)

    @property
    def is_ended(self) -> bool:
        """Whether EOS was accepted."""
        return self._is_ended

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and nothing changes, if it is not allowed."""
        past = _Past(self._progress, self._is_bound, self._is_ended, self._in_grammar and not self._is_ended)
        if past.is_grammars:
            if not self._grammar.accept(token_id):
                return False
            self._is_ended = token_id == self._eos
        elif not self._is_ended and not self._accept_free(token_id):
            return False
        self._past.append(past)
        return True

    def rollback(self, tokens: int) -> None:
        """Take the last tokens back. Raises ValueError for more than are remembered."""
        if not 0 <= tokens <= len(self._past):
            raise ValueError(f"rollback of {tokens} tokens, {len(self._past)} are remembered: raise rollback_max")
        grammars = 0
        for _ in range(tokens):
            past = self._past.pop()
            grammars += past.is_grammars
            self._progress, self._is_bound, self._is_ended = past.progress, past.is_bound, past.is_ended
        if grammars:
            self._grammar.rollback(grammars)

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask | None]:
        """Masks of the next 1 + len(drafts) rows, row k for the token behind draft k; None: everything is allowed.

        Nothing is accepted. Rows behind a draft that is not allowed are None: it cannot be accepted, so they never
        count. Raises ValueError for more drafts than can be taken back.
        """
        rows = [self._mask()]
        for draft in drafts:
            if not self.accept(draft):
                break
            rows.append(self._mask())
        self.rollback(len(rows) - 1)
        return rows + [None] * (1 + len(drafts) - len(rows))

    def follow(self, tokens: Sequence[int]) -> bool:
        """Accept output tokens that are final; False if one is not allowed: then `failure` says which, for good."""
        for token_id in tokens:
            if self.failure:
                break
            try:
                if not self.accept(token_id):
                    self.failure = f"output token {self.followed} (id {token_id}) is not allowed by the grammar"
                    break
            except GrammarError as error:
                self.failure = f"the grammar failed at output token {self.followed}: {error}"
                break
            self.followed += 1
        return not self.failure

    @property
    def _in_grammar(self) -> bool:
        return self._progress == len(self._trigger)

    def _accept_free(self, token_id: int) -> bool:
        """A token before the grammar. In free text the trigger is searched for, as by Knuth, Morris and Pratt."""
        if self._is_bound:
            if token_id != self._trigger[self._progress]:
                return False
            self._progress += 1
            return True
        if token_id == self._eos:
            if self._spec.must_begin:
                return False
            self._is_ended = True
            return True
        while self._progress and token_id != self._trigger[self._progress]:
            self._progress = self._border[self._progress - 1]
        if token_id == self._trigger[self._progress]:
            self._progress += 1
        self._is_bound = token_id == self._spec.bound_token_id
        return True

    def _mask(self) -> Mask | None:
        if self._is_ended:
            return None
        if self._in_grammar:
            return self._grammar.allowed()
        if self._is_bound:
            return _only(self._trigger[self._progress], self._vocabulary)
        return _all_but(self._eos, self._vocabulary) if self._spec.must_begin else None


def unpack(mask: Mask, vocabulary: int) -> npt.NDArray[np.bool_]:
    """A mask as bool [vocabulary]."""
    return np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)


def _borders(trigger: tuple[int, ...]) -> list[int]:
    """For each prefix of the trigger the length of its longest proper prefix that is also its end."""
    borders = [0] * len(trigger)
    length = 0
    for i in range(1, len(trigger)):
        while length and trigger[i] != trigger[length]:
            length = borders[length - 1]
        length += trigger[i] == trigger[length]
        borders[i] = length
    return borders


def _only(token_id: int, vocabulary: int) -> Mask:
    mask = np.zeros(-(-vocabulary // WORD_BITS), np.uint32)
    mask[token_id // WORD_BITS] = 1 << token_id % WORD_BITS
    return mask.view(np.int32)


def _all_but(token_id: int, vocabulary: int) -> Mask:
    return ~_only(token_id, vocabulary)
