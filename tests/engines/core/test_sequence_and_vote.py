"""The legal moves of a sequence, and the group's vote."""

from dataclasses import replace

import pytest
from shoal.engines.config import Role
from shoal.engines.core.plan import Ballot, StepKind
from shoal.engines.core.request import FinishReason
from shoal.engines.core.sequence import NEXT, IllegalTransitionError, Phase, Sequence
from shoal.engines.core.vote import Point, decide, tally

from tests.engines.core.desk import request_of

BALLOT = Ballot(Role.NORMAL, 70, True, True, False, 70, 100, True)


@pytest.mark.parametrize("start", Phase)
@pytest.mark.parametrize("to", Phase)
def test_every_move_is_legal_or_names_both_phases(start, to):
    sequence = Sequence(request_of("a", 5), phase=start)
    if to in NEXT[start]:
        sequence.move(to)
        assert sequence.phase is to
        return
    with pytest.raises(IllegalTransitionError, match=f"sequence a: {start} -> {to} is illegal"):
        sequence.move(to)
    assert sequence.phase is start


def test_a_sequence_ends_once():
    sequence = Sequence(request_of("a", 5))
    sequence.finish(FinishReason.ABORT)
    with pytest.raises(IllegalTransitionError, match="finished -> finished"):
        sequence.finish(FinishReason.STOP)
    assert sequence.reason is FinishReason.ABORT


def test_restarting_with_memory_is_a_defect():
    sequence = Sequence(request_of("a", 5), phase=Phase.RUNNING)
    sequence.block_table = [3]
    with pytest.raises(AssertionError, match="a restarts while it owns blocks"):
        sequence.restart()


def test_token_slices_cross_from_prompt_to_output():
    sequence = Sequence(request_of("a", 5))
    for token in (7, 8, 9):
        sequence.push(token)
    everything = (100, 101, 102, 103, 104, 7, 8, 9)
    for start in range(9):
        for end in range(start, 9):
            assert sequence.token_slice(start, end) == everything[start:end]


def test_ranks_out_of_step_may_not_vote_together():
    with pytest.raises(ValueError, match="ranks out of step"):
        decide([BALLOT, replace(BALLOT, decode_step=71)])
    with pytest.raises(ValueError, match="ranks out of step"):
        decide([BALLOT, replace(BALLOT, role=Role.PROMPT)])


def test_one_busy_rank_keeps_an_otherwise_idle_group_from_voting():
    idle = replace(BALLOT, decode_step=1, is_idle=True)
    assert decide([idle, idle]) is StepKind.PREFILL
    busy = replace(idle, is_idle=False, wants=False, has_result=False)
    assert tally([idle, busy]) == (StepKind.DECODE, Point.NONE, ((), ()))


def test_one_rank_with_work_is_enough_when_the_group_is_idle():
    idle = replace(BALLOT, decode_step=1, is_idle=True)
    without = replace(idle, wants=False, has_result=False)
    assert tally([without, idle]) == (StepKind.PREFILL, Point.ANY, ((1, 1), (0, 0)))
