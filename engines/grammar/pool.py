"""Compiles grammars beside the steps, in threads of their own, each with a deadline."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.engines.core.grammar.matcher import Grammar, GrammarError
from shoal.engines.core.grammar.spec import GrammarSpec

THREADS = 2
DEADLINE_S = 20.0


class GrammarPool:
    """One engine's compiler threads. A text that takes too long keeps its thread until it is done; others go on.

    `counts` has the requests whose grammar was compiled ("success"), is none ("failed") or took too long ("timeout").
    """

    def __init__(
        self, compile_spec: Callable[[GrammarSpec], Grammar], threads: int = THREADS, deadline_s: float = DEADLINE_S
    ) -> None:
        self._compile = compile_spec
        self._deadline_s = deadline_s
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self.counts = {"success": 0, "failed": 0, "timeout": 0}

    async def compile(self, spec: GrammarSpec) -> Grammar | str:
        """The grammar at its beginning, or why there is none, with what to do about it."""
        work = asyncio.wrap_future(self._workers.submit(self._compile, spec))
        try:
            grammar = await asyncio.wait_for(work, self._deadline_s)
        except TimeoutError:
            self.counts["timeout"] += 1
            return f"the {spec.kind} grammar did not compile within {self._deadline_s:g} s; ask for a simpler one"
        except GrammarError as error:
            self.counts["failed"] += 1
            return f"the {spec.kind} grammar does not compile: {error}"
        self.counts["success"] += 1
        return grammar

    def close(self) -> None:
        """Take nothing new; what runs ends by itself."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def no_grammar(spec: GrammarSpec) -> Grammar:
    """What an engine without a tokenizer compiles: nothing."""
    raise GrammarError("this engine has no tokenizer to compile it for")
