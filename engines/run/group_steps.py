"""Ranks of a group step together: before each step everybody's ballot is gathered, and all decide alike."""

import torch
from shoal.engines.config import Role
from shoal.engines.core.plan import Ballot, StepKind
from shoal.engines.core.vote import decide
from shoal.engines.run.engine import Engine
from shoal.engines.run.rank_group import Collectives
from torch import Tensor

ROLES = tuple(Role)


class GroupSteps:
    """One rank's part in the votes. `votes` counts them: it is the same on all ranks between two steps."""

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self.votes = 0

    def agree(self, engine: Engine, now_us: int) -> StepKind | None:
        """The next step of all ranks, or None while no rank has work: then nobody steps. Waits for all ranks.

        Raises GroupBrokenError, and ValueError if the ranks are not of one kind or out of step.
        """
        ballots = self._group.all_gather(to_row(engine.ballot(now_us), engine.has_work))
        self.votes += 1
        if not bool(ballots[:, 0].any()):
            return None
        return decide([from_row(row) for row in ballots])


def to_row(ballot: Ballot, has_work: bool) -> Tensor:
    """A ballot and whether its rank has work, int64 [9]; its reason stays at home."""
    return torch.tensor(
        (
            has_work, ROLES.index(ballot.role), ballot.decode_step, ballot.wants, ballot.has_result, ballot.is_idle,
            ballot.all_interval, ballot.any_interval, ballot.vote_when_idle,
        ),
        dtype=torch.int64,
    )  # fmt: skip


def from_row(row: Tensor) -> Ballot:
    """The ballot in a row of `to_row`."""
    _, role, step, wants, has_result, is_idle, all_interval, any_interval, vote_when_idle = row.tolist()
    flags = (bool(wants), bool(has_result), bool(is_idle))
    return Ballot(ROLES[role], step, *flags, all_interval, any_interval, bool(vote_when_idle))
