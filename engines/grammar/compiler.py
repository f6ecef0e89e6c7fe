"""xgrammar behind the matcher's port: what a request asks becomes a compiled grammar over one tokenizer's bytes.

xgrammar (with transformers behind it: seconds and 270 MB) is imported when the first grammar comes, not before.
"""

import re
import threading
from typing import Any, cast

import numpy as np
from shoal.engines.core.grammar.matcher import WORD_BITS, Grammar, GrammarError, Mask
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.grammar.token_bytes import TokenBytes

DSML = "｜DSML｜"  # the one special token that is part of a text a grammar can describe: tool calls are written with it
# White space between JSON's parts: enough for an indented text, and a bound on what a model can go on and on with.
WHITESPACE_MAX = 32
CACHE_BYTES = 256 << 20
ANY_OBJECT = '{"type":"object"}'
_PLACE = re.compile(r"^\[[0-9:]+\] \S+: ")


def objection(spec: GrammarSpec) -> str:
    """Why the text is not a grammar at all, without compiling it for a tokenizer; "" if it is one.

    Takes milliseconds, and seconds the first time in a process.
    """
    from xgrammar import Grammar as Parsed

    try:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                Parsed.from_json_schema(spec.text, max_whitespace_cnt=WHITESPACE_MAX)
            case GrammarKind.JSON_OBJECT:
                pass
            case GrammarKind.REGEX:
                Parsed.from_regex(spec.text)
            case GrammarKind.EBNF:
                Parsed.from_ebnf(spec.text)
            case GrammarKind.STRUCTURAL_TAG:
                Parsed.from_structural_tag(spec.text)
    except (RuntimeError, ValueError) as error:
        return _reason(error)
    return ""


class GrammarCompiler:
    """Compiles for one tokenizer and vocabulary. Thread safe; xgrammar caches what it compiled, up to `cache_bytes`.

    `whitespace_max`: characters of white space in a row between the parts of JSON.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        vocabulary: int,
        eos_token_id: int,
        cache_bytes: int = CACHE_BYTES,
        whitespace_max: int = WHITESPACE_MAX,
    ) -> None:
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._eos = eos_token_id
        self._cache_bytes = cache_bytes
        self._whitespace_max = whitespace_max
        self._lock = threading.Lock()
        self._compilers: dict[bool, Any] = {}

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar at its beginning; equal specs share what is compiled. Raises GrammarError for a text that is none.

        May take from microseconds (seen before) to as long as the text's author likes: not for a thread that steps.
        """
        from xgrammar import GrammarMatcher

        compiler, spaces = self._compiler(with_markup=spec.kind is GrammarKind.STRUCTURAL_TAG), self._whitespace_max
        try:
            match spec.kind:
                case GrammarKind.JSON_SCHEMA:
                    compiled = compiler.compile_json_schema(spec.text, max_whitespace_cnt=spaces)
                case GrammarKind.JSON_OBJECT:
                    compiled = compiler.compile_json_schema(ANY_OBJECT, max_whitespace_cnt=spaces)
                case GrammarKind.REGEX:
                    compiled = compiler.compile_regex(spec.text)
                case GrammarKind.EBNF:
                    compiled = compiler.compile_grammar(spec.text)
                case GrammarKind.STRUCTURAL_TAG:
                    compiled = compiler.compile_structural_tag(spec.text)
            return CompiledGrammar(GrammarMatcher(compiled), self._vocabulary)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_reason(error)) from error

    def _compiler(self, with_markup: bool) -> Any:
        """xgrammar's compiler over all text tokens, for tool calls also over the token that marks them."""
        with self._lock:
            if with_markup not in self._compilers:
                from xgrammar import GrammarCompiler as Compiler
                from xgrammar import TokenizerInfo, VocabType

                pieces = [self._piece(token_id, with_markup) for token_id in range(self._vocabulary)]
                info = TokenizerInfo(pieces, VocabType.RAW, vocab_size=self._vocabulary, stop_token_ids=[self._eos])
                half = self._cache_bytes // 2
                self._compilers[with_markup] = Compiler(info, max_threads=1, cache_limit_bytes=half)
            return self._compilers[with_markup]

    def _piece(self, token_id: int, with_markup: bool) -> bytes:
        """Bytes of a token; none (it is never allowed) for markup and for ids that the tokenizer lacks."""
        spelling = self._tokens.special.get(token_id)
        if spelling is None or (with_markup and spelling == DSML):
            return self._tokens.of(token_id)
        return b""


class CompiledGrammar:
    """The matcher's port over one xgrammar matcher."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._words = -(-vocabulary // WORD_BITS)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and nothing changes, if it is not allowed here."""
        try:
            return bool(self._matcher.accept_token(token_id))
        except RuntimeError as error:
            raise GrammarError(_reason(error)) from error

    def rollback(self, tokens: int) -> None:
        """Take the last accepted tokens back."""
        try:
            self._matcher.rollback(tokens)
        except RuntimeError as error:
            raise GrammarError(_reason(error)) from error

    def allowed(self) -> Mask:
        """Which tokens may come next."""
        mask = np.full((1, self._words), -1, np.int32)
        try:
            self._matcher.fill_next_token_bitmask(mask, 0)
        except RuntimeError as error:
            raise GrammarError(_reason(error)) from error
        return cast(Mask, mask[0])

    def copy(self) -> "CompiledGrammar":
        """Another one at the same place; the compiled grammar itself is shared."""
        return CompiledGrammar(self._matcher.fork(), self._words * WORD_BITS)


def _reason(error: Exception) -> str:
    """xgrammar's message without time, file and line."""
    return _PLACE.sub("", str(error)).strip() or type(error).__name__
