"""A desk whose steps overlap, with a stand-in for the device that sees only what is uploaded to it."""

from dataclasses import dataclass, field

import numpy as np
from shoal.engines.core.acceptance import accepted_prefix
from shoal.engines.core.plan import Event, Plan, StepKind, StepResult
from shoal.engines.core.vote import decide
from shoal.engines.core.zos_device import correct_lengths, gather_lookback, gather_tokens, redistribute
from shoal.engines.core.zos_remap import Remap, lookback_window, remap_plans

from tests.engines.core.desk import Desk, drafts_of, hash_of, next_token, truth_of

REACH = 3


@dataclass
class Launched:
    """A step on the device: rows and key lengths there, input ids a row, and the result once it is sampled."""

    plan: Plan
    remap: Remap | None
    q: list[int]
    k: list[int]
    ids: list[list[int]]
    result: StepResult | None = None


@dataclass
class PipelineDesk(Desk):
    """Plans at most one step behind an open decode step; checks the device's view against the true sequence."""

    flying: list[Launched] = field(default_factory=list)
    stored: dict[int, list[int]] = field(default_factory=dict)  # draft slot -> drafts whose info it holds

    def plan(self) -> Plan:
        """Plan and launch."""
        scheduler = self.scheduler
        assert scheduler.may_plan
        plan = scheduler.plan(decide([scheduler.ballot(now_us=0)]), now_us=0)
        scheduler.check()
        self.plans.append(plan)
        launched = self._launch(plan)
        self.flying.append(launched)
        if self.memory is not None:
            self.memory.copy(plan)
            for item, q, k, ids in zip(plan.items, launched.q, launched.k, launched.ids, strict=True):
                if not self._has_ended(item, k - q):
                    self.memory.compute(item, k - q, ids)
        if not plan.behind and len(self.flying) == 1:
            self._sample(self.flying[0], plan)
        return plan

    def commit(self, plan: Plan | None = None, tokens=None, failed=()) -> tuple[Event, ...]:
        """Commit the oldest step, then fix up and sample the one behind it."""
        oldest = self.flying.pop(0)
        if oldest.result is None:  # a prefill behind a decode step, committed in place
            self._sample(oldest, oldest.plan)
        result = oldest.result
        if failed:
            result = StepResult(**{n: getattr(result, n) for n in result.__dataclass_fields__} | {"failed": failed})
        events = self.scheduler.commit(oldest.plan, result, now_us=0)
        self.scheduler.check()
        self.events += events
        if self.flying:
            behind = self.flying[0]
            fixed = self.scheduler.fix_up(behind.plan, behind.q if behind.plan.behind else None)
            self._agree(behind, fixed)
            self._sample(behind, fixed)
        return events

    def step(self, tokens=None) -> Plan:
        plan = self.plan()
        if plan.kind is StepKind.PREFILL or not self.scheduler.rules.pipelined:
            self.flush()
        elif len(self.flying) > 1:
            self.commit()
        return plan

    def flush(self) -> None:
        while self.flying:
            self.commit()

    def run_until_idle(self, steps_max=500):
        super().run_until_idle(steps_max)
        self.flush()

    def _launch(self, plan: Plan) -> Launched:
        rules = self.scheduler.rules
        fresh = Launched(
            plan,
            None,
            [i.rows for i in plan.items],
            [i.end for i in plan.items],
            [list(i.token_ids) for i in plan.items],
        )
        if plan.kind is StepKind.PREFILL or not plan.behind:
            return fresh
        before = self.flying[0]
        remap = remap_plans(before.plan, plan, len(plan.items) + 2, rules.drafts)
        if remap is None:
            return fresh
        for item, m in zip(plan.items, remap.previous, strict=False):
            assert m < 0 or not item.read_slot, "drafts that are still being made were planned to be read"
        index, q, base = (np.array(column) for column in remap)
        accepted = np.array([len(one) for one in before.result.accepted] or [0] * len(before.q))
        made = np.array(before.result.drafts, dtype=np.int64).reshape(len(before.q), rules.drafts)
        if self.scheduler.chooses_rows and rules.drafts:
            real = len(plan.items)
            q[:real] = redistribute(np.array(before.result.confidences, dtype=np.float32), index[:real], plan.rows)
        k = correct_lengths(base, q, index, accepted, rules.drafts)
        # A fresh row may get more rows than planned: the host gives its last token and all held drafts.
        pairs = zip(plan.items, remap.previous, strict=False)
        given = [[*i.token_ids[:1], *i.sequence.drafts] if m < 0 else [] for i, m in pairs] + [[0], [0]]
        sampled = np.array(before.result.sampled)
        ids = gather_tokens(q, index, sampled, made, given)
        self._check_lookback(plan, remap, (q, index, accepted, ids), k)
        ends = np.cumsum(q).tolist()
        rows = [ids[end - n : end].tolist() for end, n in zip(ends, q.tolist(), strict=True)]
        real = len(plan.items)
        return Launched(plan, remap, q.tolist()[:real], k.tolist()[:real], rows[:real])

    def _check_lookback(self, plan: Plan, remap: Remap, gathered, k) -> None:
        q, index, accepted, ids = gathered
        drafts = self.scheduler.rules.drafts
        windows = [
            lookback_window(i, m < 0, drafts, REACH) for i, m in zip(plan.items, remap.previous, strict=False)
        ] + [(), ()]
        found = gather_lookback(q, index, accepted, ids, windows, drafts, REACH)
        row = 0
        for at, item in enumerate(plan.items):
            for j in range(q[at]):
                position = int(k[at] - q[at]) + j
                before = [truth_of(item, position - b) if b > j else int(ids[row - b]) for b in range(1, REACH + 1)]
                if not self._has_ended(item, position - j):
                    assert found[row].tolist() == before, f"{item.request_id} at {position}"
                row += 1

    def _has_ended(self, item, start: int) -> bool:
        """Whether the step in flight ends this sequence, so that the device goes on with tokens that will not count."""
        sequence = item.sequence
        request = sequence.request
        cap = min(request.prompt_len + request.sampling.max_tokens, self.scheduler.config.max_model_len + 1)
        return sequence.is_finished or start + 1 >= cap

    def _agree(self, launched: Launched, fixed: Plan) -> None:
        """After the fix-up the host knows what the device computed."""
        for item, q, k, ids in zip(fixed.items, launched.q, launched.k, launched.ids, strict=True):
            if item.sequence.is_finished:
                assert item.read_slot == 0
                continue
            assert (item.rows, item.end) == (q, k), f"{item.request_id}: host {item.rows, item.end}, device {q, k}"
            assert list(item.token_ids) == ids, f"{item.request_id}: host {item.token_ids}, device {ids}"
            assert k <= 16 * len(item.block_table)
        launched.plan = fixed

    def _sample(self, launched: Launched, plan: Plan) -> None:
        drafts = self.scheduler.rules.drafts
        if plan.kind is StepKind.PREFILL:
            launched.result = StepResult([next_token(i.request_id, i.end) for i in plan.items])
            return
        verified, made = [], []
        for item, q, k, ids in zip(plan.items, launched.q, launched.k, launched.ids, strict=True):
            start = k - q
            if not item.sequence.is_finished:
                assert ids[0] == truth_of(item, start), f"{item.request_id} computes {ids} at {start}"
                if item.read_slot:
                    assert self.stored[item.read_slot][: q - 1] == ids[1:]
                else:
                    assert ids[1:] == [self.scheduler.rules.pad_token_id] * (q - 1)
            outputs = [next_token(item.request_id, start + 1 + row) for row in range(q)]
            hits = [a == b for a, b in zip(ids[1:], outputs, strict=False)]
            verified.append(accepted_prefix(ids[1:], hits, outputs))
            made.append(drafts_of(item.request_id, start + 2 + len(verified[-1].accepted), drafts))
        for item, new in zip(plan.items, made, strict=True):
            self.stored[item.write_slot] = new
        launched.result = StepResult(
            sampled=[v.sampled for v in verified],
            accepted=[v.accepted for v in verified],
            drafts=made,
            confidences=[[hash_of(f"{i.request_id}{i.start}{d}") % 9 / 8 for d in range(drafts)] for i in plan.items],
        )
