"""Keeps the experts of a group balanced while it serves: counts, solves beside the steps, moves weights between them.

All ranks see the same steps and gather the same loads, so each computes the same placement and takes it into use after
the same step; nothing is agreed on by messages but the loads themselves. Answers do not change: an expert computes the
same wherever it lies.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from shoal.engines.core.experts.placement import Placement
from shoal.engines.core.experts.policy import BUCKETS, solve
from shoal.engines.core.experts.statistics import BalanceMeter, LoadWindow
from shoal.engines.core.experts.timing import Timing, TimingConfig
from shoal.engines.run.experts_move import ExpertBank, ExpertMover
from shoal.engines.run.grouped_experts import GroupedExperts
from shoal.engines.run.rank_group import Collectives

log = logging.getLogger(__name__)

SOLVE_STEPS = 8  # after so many steps a solution is taken into use: long before that it is there


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """When experts are rearranged, and how much of that one step carries.

    `step_bytes_max` out of a rank and into it; `wait_s` for peers whose bytes are late.
    """

    timing: TimingConfig
    step_bytes_max: int = 64 << 20
    wait_s: float = 30.0


class ExpertBalance:
    """One rank's part. `after_step` is called on every rank after every step."""

    def __init__(
        self,
        group: Collectives,
        experts: GroupedExperts,
        bank: ExpertBank,
        placement: Placement,
        config: BalanceConfig,
    ) -> None:
        self._group, self._experts = group, experts
        self._mover = ExpertMover(bank, placement, group, config.step_bytes_max, config.wait_s)
        self._timing = Timing(config.timing, group.size)
        self._window = LoadWindow(config.timing.window, placement.layers, placement.expert_count, BUCKETS)
        self._solver = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._solving: Future[Placement] | None = None
        self._due_steps = 0
        self._meter = BalanceMeter()
        self.rearranged = 0
        self.layers_changed = 0

    def after_step(self, is_prefill: bool) -> None:
        """Count the step; go on with what is under way. Raises GroupBrokenError, ExpertMoveError."""
        own, of_ranks = self._experts.take_counts()
        self._meter.add(of_ranks)
        tick = self._timing.step(is_prefill)
        if tick.is_recorded:
            self._window.add(own)
        if self._mover.is_moving and (changed := self._mover.step()):
            self.layers_changed += len(changed)
            self._experts.use(self._mover.placement)
        if self._solving is not None:
            self._due_steps -= 1
            if not self._due_steps:
                self._begin(self._solving.result())
        elif tick.rearranges and not self._mover.is_moving:
            self._gather_and_solve()

    def counters(self) -> dict[str, int]:
        """Rows that experts computed, for metrics: `moe_lb` of any time is ranks x busiest / all."""
        return {
            "experts_rows_all": round(self._meter.mean_sum * self._group.size),
            "experts_rows_busiest": round(self._meter.max_sum),
            "experts_rearranged": self.rearranged,
            "experts_layers_changed": self.layers_changed,
        }

    @property
    def moe_lb(self) -> float:
        """Rows of the busiest rank over those of the mean rank, since the start; 1.0 is perfect."""
        return self._meter.moe_lb

    def _gather_and_solve(self) -> None:
        loads = torch.from_numpy(self._window.loads())
        self._window.clear()
        total = self._group.all_gather(loads).sum(0).numpy()
        if not total.any():  # nothing to learn from, on any rank
            return
        self._solving = self._solver.submit(solve, total, self._mover.placement)
        self._due_steps = SOLVE_STEPS

    def _begin(self, target: Placement) -> None:
        self._solving = None
        steps = self._mover.begin(target)
        self._experts.use(self._mover.placement)
        self.rearranged += 1
        moved = int((target.experts != self._mover.placement.experts).any(-1).sum())
        log.info("experts: %d layers are rearranged in %d steps; moe_lb so far %.3f", moved, steps, self.moe_lb)
