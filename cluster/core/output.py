"""Output tokens of one request over all its attempts: each index once, in order, gaps visible."""

from shoal.engines.core.request import FinishReason, SamplingParams, TokenLogprobs, TokensEvent


class Output:
    """Emitted tokens, and those that came before their predecessors. At most `max_tokens` are ever kept."""

    def __init__(self, request_id: str, sampling: SamplingParams, end_token_ids: tuple[int, ...]) -> None:
        self._request_id = request_id
        self._sampling = sampling
        self._end_token_ids = () if sampling.ignore_eos else end_token_ids
        self._token_ids: list[int] = []
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens the client has been given."""
        return tuple(self._token_ids)

    @property
    def has_gap(self) -> bool:
        """A later token is here and an earlier one is not."""
        return bool(self._early)

    def take(self, tokens: TokensEvent) -> TokensEvent | None:
        """Tokens that may be emitted now, as the client's request's; repeated ones are dropped."""
        first = len(self._token_ids)
        told = zip(tokens.token_ids, tokens.logprobs or (None,) * len(tokens.token_ids), strict=True)
        for index, one in enumerate(told, tokens.index):
            if first <= index < self._sampling.max_tokens:
                self._early.setdefault(index, one)
        logprobs = []
        while len(self._token_ids) in self._early:
            token_id, logprob = self._early.pop(len(self._token_ids))
            self._token_ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        if len(self._token_ids) == first:
            return None
        return TokensEvent(self._request_id, first, tuple(self._token_ids[first:]), tuple(logprobs))

    def forget_early(self) -> None:
        """Drop what was not emitted: the attempt that produced it is over, and the next one computes it again."""
        self._early.clear()

    def ending(self) -> FinishReason | None:
        """How the answer has ended by the request's own limits, or None if it goes on."""
        if not self._token_ids:
            return None
        last = self._token_ids[-1]
        if last in self._end_token_ids or last in self._sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._token_ids) >= self._sampling.max_tokens else None
