"""The mode of the process under regions of several threads, against a plain reading of the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.core.sync_intents import Intent, SyncIntents, SyncMode

OPERATIONS = st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from([*Intent, None])), max_size=40)


@given(OPERATIONS, st.sampled_from(SyncMode))
def test_the_mode_is_what_the_rule_says_of_all_stacks(operations, baseline):
    intents, stacks, mode = SyncIntents(), {name: [] for name in "ABC"}, baseline
    for thread, intent in operations:
        if intent is None and not stacks[thread]:
            with pytest.raises(ValueError, match="did not enter"):
                intents.leave(thread)
            continue
        if intent is None:
            stacks[thread].pop()
            mode = intents.leave(thread)
        else:
            stacks[thread].append(intent)
            mode = intents.enter(thread, intent, found=mode)
        tops = {stack[-1] for stack in stacks.values() if stack}
        wanted = SyncMode.DEFAULT if Intent.ALLOW in tops else SyncMode.ERROR if tops else baseline
        assert mode is wanted
