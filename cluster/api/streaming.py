"""From token ids to text a client may see: incremental detokenising and stop strings held back."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from shoal.engines.grammar.token_bytes import TokenBytes


class Detokeniser:
    """Turns tokens into text piece by piece; a character is given out only when all its bytes are there.

    The concatenated output is the one-shot decoding of the same ids, however they are cut. `shown` are the special
    ids whose spelling is text for the next stage (the reasoning and tool markers); other special ids are silent.
    """

    __slots__ = ("_decoder", "_hidden", "_tokens")

    def __init__(self, tokens: TokenBytes, shown: Collection[int] = ()) -> None:
        self._tokens = tokens
        self._hidden = tokens.special.keys() - set(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became complete with these tokens."""
        of, hidden = self._tokens.of, self._hidden
        return self._decoder.decode(b"".join([of(i) for i in token_ids if i not in hidden]))

    def finish(self) -> str:
        """What is left: U+FFFD for a character the model never completed."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts a text at the first stop string and never lets a part of one out before it is ruled out.

    The match that ends first wins, the longest of those that end together; the text before it is what remains. The
    result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_stops", "emitted", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.emitted = 0  # characters given out so far
        self.matched: str | None = None  # the stop string found

    @property
    def held(self) -> int:
        """Characters kept back because they may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """What may be shown now; after a match everything later is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            self.emitted += len(text)
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            return self._emit(text, start)
        return self._emit(text, len(text) - max(_prefix_at_end(text, stop) for stop in self._stops))

    def let_pass(self, text: str) -> str:
        """Text in which no stop string counts, nor begins one."""
        return self._emit(self._held + text, len(self._held) + len(text))

    def finish(self) -> str:
        """The answer ended: what was held back was no stop string."""
        return self._emit(self._held, len(self._held))

    def _emit(self, text: str, end: int) -> str:
        self._held = "" if self.matched is not None else text[end:]
        self.emitted += end
        return text[:end]


def _prefix_at_end(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
