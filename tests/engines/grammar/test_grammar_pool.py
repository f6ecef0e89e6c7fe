"""Compiling beside the steps: each outcome counted, a stuck text does not keep others from theirs."""

import threading

from shoal.engines.core.grammar.matcher import Grammar
from shoal.engines.core.grammar.spec import GrammarKind, GrammarSpec
from shoal.engines.grammar.compiler import GrammarCompiler
from shoal.engines.grammar.pool import GrammarPool, no_grammar
from shoal.engines.grammar.token_bytes import TokenBytes

TOKENS = TokenBytes((b"", b"", b"a", b"b"), {0: "<bos>", 1: "<eos>"})
COMPILER = GrammarCompiler(TOKENS, vocabulary=4, eos_token_id=1)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


async def test_success_failure_and_timeout_are_told_and_counted():
    stuck = threading.Event()

    def compile_spec(spec: GrammarSpec) -> Grammar:
        if spec.text == "stuck":
            stuck.wait(30)
        return COMPILER.compile(spec)

    COMPILER.compile(regex("a"))  # imports, which count against nobody's deadline here
    pool = GrammarPool(compile_spec, threads=2, deadline_s=0.5)
    try:
        late = await pool.compile(regex("stuck"))
        assert late == "the regex grammar did not compile within 0.5 s; ask for a simpler one"
        grammar = await pool.compile(regex("ab"))
        assert not isinstance(grammar, str)
        assert grammar.accept(2)
        assert not grammar.accept(2)
        assert await pool.compile(regex("(")) == (
            "the regex grammar does not compile: Regex parsing error at position 2: The parenthesis is not closed."
        )
        assert pool.counts == {"success": 1, "failed": 1, "timeout": 1}
    finally:
        stuck.set()
        pool.close()


async def test_equal_texts_have_states_of_their_own():
    one, other = COMPILER.compile(regex("ab")), COMPILER.compile(regex("ab"))
    assert one.accept(2)
    assert not one.accept(2)
    assert other.accept(2)


async def test_an_engine_without_a_tokenizer_says_so():
    pool = GrammarPool(no_grammar)
    assert "no tokenizer" in str(await pool.compile(regex("a")))
    pool.close()
