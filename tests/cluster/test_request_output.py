"""Output of a request over its attempts: whatever comes in whatever order, each token once and in its place."""

from hypothesis import given
from hypothesis import strategies as st
from shoal.cluster.core.output import Output
from shoal.engines.core.request import SamplingParams, TokenLogprobs, TokensEvent

LIMIT = 9


@given(st.data(), st.booleans())
def test_overlapping_steps_in_any_order_come_out_once_and_in_order(data, with_logprobs):
    """A token's id and logprob follow from its index, so that whoever emits it does not matter."""
    pieces = data.draw(st.lists(st.tuples(st.integers(0, LIMIT + 2), st.integers(1, 4)), max_size=12))
    output, shown, told, seen = Output("r", SamplingParams(max_tokens=LIMIT), (1,)), [], [], set()
    for first, count in pieces:
        places = range(first, first + count)
        seen.update(places)
        logprobs = tuple(TokenLogprobs(-1.0 * i) for i in places) if with_logprobs else ()
        ready = output.take(TokensEvent("r/1", first, tuple(100 + i for i in places), logprobs))
        if ready is not None:
            assert (ready.request_id, ready.index) == ("r", len(shown))
            assert ready.token_ids
            shown += ready.token_ids
            told += ready.logprobs
        reach = next(i for i in range(LIMIT + 1) if i not in seen or i == LIMIT)
        assert shown == [100 + i for i in range(reach)]
        assert told == ([TokenLogprobs(-1.0 * i) for i in range(reach)] if with_logprobs else [])
        assert output.token_ids == tuple(shown)
        assert output.has_gap == any(reach < i < LIMIT for i in seen)
