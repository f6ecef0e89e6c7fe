"""The matcher's bookkeeping against a naive model, and its masks for drafts, on a grammar made of sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.core.grammar.matcher import GrammarError, Matcher, unpack
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec

EOS, VOCABULARY = 1, 40


class Countdown:
    """Position k allows the ids 2..9 that are not k modulo 10; after `length` of them only EOS."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.taken: list[int] = []

    def _ids(self) -> set[int]:
        if EOS in self.taken:
            return set()
        return {EOS} if len(self.taken) >= self.length else set(range(2, 10)) - {len(self.taken) % 10}

    def accept(self, token_id: int) -> bool:
        if token_id not in self._ids():
            return False
        self.taken.append(token_id)
        return True

    def rollback(self, tokens: int) -> None:
        assert 0 < tokens <= len(self.taken)
        del self.taken[len(self.taken) - tokens :]

    def allowed(self) -> np.ndarray:
        bits = np.zeros(64, np.uint8)
        bits[list(self._ids())] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def matcher(length: int = 100, rollback_max: int = 8, **fields: object) -> Matcher:
    spec = GrammarSpec(GrammarKind.EBNF, **fields)
    return Matcher(Countdown(length), spec, EOS, VOCABULARY, rollback_max)


def ids(mask: np.ndarray | None) -> set[int]:
    """What a row allows."""
    return set(range(VOCABULARY)) if mask is None else set(np.flatnonzero(unpack(mask, VOCABULARY)).tolist())


def naive(tokens: list[int], length: int, spec: GrammarSpec) -> set[int]:
    """Allowed ids behind `tokens`, from the whole text: find the trigger, then replay the grammar."""
    trigger = spec.trigger_token_ids
    for end in range(len(trigger), len(tokens) + 1):
        if tuple(tokens[end - len(trigger) : end]) == trigger and EOS not in tokens[:end]:
            grammar = Countdown(length)
            if EOS in tokens[end:]:
                return set(range(VOCABULARY))
            assert all(grammar.accept(token) for token in tokens[end:])
            return ids(grammar.allowed())
    if EOS in tokens:
        return set(range(VOCABULARY))
    if spec.bound_token_id in tokens:
        rest = tokens[tokens.index(spec.bound_token_id) + 1 :]
        before = tokens[: len(tokens) - len(rest)]
        overlap = max(n for n in range(len(trigger)) if tuple(before[len(before) - n :]) == trigger[:n])
        return {trigger[overlap + len(rest)]}
    return set(range(VOCABULARY)) - ({EOS} if spec.must_begin else set())


@given(st.data())
def test_every_mask_is_the_naive_one_and_drafts_leave_no_trace(data):
    trigger = tuple(data.draw(st.lists(st.integers(2, 4), max_size=4)))
    bound = data.draw(st.sampled_from([None, 3, 30])) if trigger else None
    spec = GrammarSpec(GrammarKind.EBNF, "", trigger, bound, data.draw(st.booleans()))
    length = data.draw(st.integers(0, 6))
    one = Matcher(Countdown(length), spec, EOS, VOCABULARY, rollback_max=6)
    tokens: list[int] = []
    some = st.one_of(st.integers(1, 5), st.integers(0, VOCABULARY - 1))
    for _ in range(data.draw(st.integers(1, 14))):
        drafts = data.draw(st.lists(some, max_size=4))
        rows = one.masks(drafts)
        assert len(rows) == 1 + len(drafts)
        for k, row in enumerate(rows):
            if any(draft not in naive(tokens + drafts[:i], length, spec) for i, draft in enumerate(drafts[:k])):
                assert row is None, "a row behind a refused draft is not masked"
            else:
                assert ids(row) == naive(tokens + drafts[:k], length, spec)
        token = data.draw(some)
        is_allowed = token in naive(tokens, length, spec)
        assert one.accept(token) == is_allowed
        tokens += [token] if is_allowed else []
        back = data.draw(st.integers(0, min(len(tokens), 1)))
        one.rollback(back)
        del tokens[len(tokens) - back :]


def test_a_rejected_output_fails_the_matcher_for_good():
    one = matcher()
    assert one.follow([5, 6])
    assert not one.follow([2, 7])
    assert one.failure == "output token 2 (id 2) is not allowed by the grammar"
    assert not one.follow([7])
    assert one.followed == 2


def test_a_grammar_that_breaks_is_a_failure_and_not_an_exception():
    class Broken(Countdown):
        def accept(self, token_id: int) -> bool:
            raise GrammarError("internal")

    one = Matcher(Broken(), GrammarSpec(GrammarKind.EBNF), EOS, VOCABULARY)
    assert not one.follow([5])
    assert one.failure == "the grammar failed at output token 0: internal"


def test_more_drafts_than_can_be_taken_back_are_refused():
    one = matcher(rollback_max=2)
    with pytest.raises(ValueError, match="raise rollback_max"):
        one.masks([5, 5, 5])


def test_a_bound_without_a_trigger_is_refused():
    with pytest.raises(ValueError, match="bound_token_id = 9 needs trigger_token_ids"):
        GrammarSpec(GrammarKind.EBNF, "", (), 9)
