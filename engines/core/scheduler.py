"""The step scheduler of one rank: submit work, cast a ballot, plan a step, commit its result."""

from collections.abc import Sequence as Seq

from shoal.engines.config import STEP_TIME_OFF, EngineConfig, Role
from shoal.engines.core.admission import Receiving, Swapping
from shoal.engines.core.branching import begin_branches
from shoal.engines.core.commit import collect, commit_step
from shoal.engines.core.decode import plan_decode
from shoal.engines.core.drafts import VerifyChooser
from shoal.engines.core.fork import fork
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import (
    Accepted,
    Ballot,
    Event,
    LoadTarget,
    Plan,
    Reservation,
    StepKind,
    StepResult,
)
from shoal.engines.core.prefill import plan_prefill, select, wants_prefill
from shoal.engines.core.prefill_cost import Chunk
from shoal.engines.core.queueing import expire
from shoal.engines.core.request import EngineRequest, FinishReason, NoRoom, Rejected, SamplingParams, TokenState
from shoal.engines.core.rules import SchedulingRules, check_settings
from shoal.engines.core.sequence import Phase, Sequence
from shoal.engines.core.submit import crowd, objection
from shoal.engines.core.vote import Point, point_of
from shoal.engines.core.zos_fixup import fix_up

VERDICT_OF_ROLE = {Role.PROMPT: StepKind.PREFILL, Role.COMPLETION: StepKind.DECODE}


class StepScheduler:
    """ballot -> vote (shell: `vote.decide(ballots of all ranks)`) -> plan -> run (shell) -> commit.

    Not thread safe: one task owns it. A plan must be committed before the next is made; with `rules.pipelined` one
    step, of any kind, may be planned behind an open decode step: plan N (behind N-1), launch N, commit N-1, fix_up N,
    sample N. Whatever is copied out of memory for step N-1 is copied, in device order, before N writes. Every request
    that was accepted ends with exactly one FinishEvent, except a PROMPT engine's that ends with PromptDone and
    `release`. Aborts and failures take effect, and are reported, by the next plan and its commit; so an engine with
    `has_work` must go on stepping.
    """

    def __init__(
        self,
        config: EngineConfig,
        eos_token_id: int,
        rules: SchedulingRules | None = None,
        verify: VerifyChooser | None = None,
    ) -> None:
        """`verify` chooses how many drafts a decode step verifies; without it all of them.

        Raises ValueError naming the setting, its value, the rule and the remedy.
        """
        rules = SchedulingRules() if rules is None else rules
        if config.role is Role.ENCODER:
            raise ValueError("role = encoder has no sequences to schedule: use prompt, completion or normal")
        check_settings(config, rules)
        self.config = config
        self.rules = rules
        self.eos_token_id = eos_token_id
        self._verify = verify
        self._ledger = Ledger(config, rules, keeps_rates=verify is not None)
        self._swapping = Swapping(self._ledger)
        self._receiving = Receiving(self._ledger)
        self._open: list[Plan] = []  # oldest first, at most two
        self._steps = 0
        self._collected = 0  # the last step whose finished sequences were freed

    # Work comes in, and goes before its time.

    def submit(self, request: EngineRequest, now_us: int, images_pending: bool = False) -> Accepted | Rejected:
        """Queue a prompt, or say why it can never be computed; nothing is kept of a rejected one.

        With `images_pending` it waits for `set_schedulable`; with `hit_tokens` for `load_hit` and `hit_loaded`.
        """
        if self.config.role is Role.COMPLETION:
            raise ValueError(f"{request.request_id} submitted to a completion engine: reserve and admit instead")
        sequence = Sequence(request, is_waiting_for_images=images_pending)
        reason = objection(self._ledger, sequence)
        if reason:
            return Rejected(request.request_id, reason)
        if reason := crowd(self._ledger):
            return Rejected(request.request_id, reason, is_full=True)
        self._ledger.enter(sequence)
        return Accepted(request.request_id)

    def set_schedulable(self, request_id: str) -> bool:
        """The images of a request are at hand. False if the request is not here (any more)."""
        sequence = self._ledger.sequences.get(request_id)
        if sequence is None:
            return False
        sequence.is_waiting_for_images = False
        return True

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is: waiting, loading, arrived, running, in the open plan, or only reserved.

        Its memory is freed by the next plan or its commit; whoever still writes into it must have stopped before
        (a load, a hand-off). False if there is nothing to end: unknown, ended, or prefilled and waiting for `release`.
        """
        reservation = self._ledger.reservations.get(request_id)
        if reservation is not None:
            return self.cancel(reservation)
        return self._end(request_id, FinishReason.ABORT, "")

    def fail(self, request_id: str, detail: str) -> bool:
        """As `abort`, for a request that cannot go on: an image or a grammar failed. Reported as ERROR."""
        return self._end(request_id, FinishReason.ERROR, detail)

    def refuse(self, request_id: str, detail: str) -> bool:
        """As `abort`, for a request that no engine can serve: its grammar is none. Reported as REFUSED."""
        return self._end(request_id, FinishReason.REFUSED, detail)

    def set_constrained(self, request_id: str) -> bool:
        """A grammar constrains the output, and its state cannot be recomputed. False if the request is not here."""
        sequence = self._ledger.sequences.get(request_id)
        if sequence is None:
            return False
        sequence.is_constrained = True
        return True

    def fork(
        self, parent_id: str, request_id: str, sampling: SamplingParams, prompt_len: int | None = None
    ) -> Accepted | NoRoom | Rejected:
        """Branch a sequence: a new request that begins with all of the parent's tokens and shares what is computed.

        `prompt_len` (by default the parent's) is where the branch's outputs are counted from. The next plan copies
        what the two would write differently; the parent may go on. NoRoom: try again after a step.
        """
        return fork(self._ledger, parent_id, request_id, sampling, prompt_len)

    # A prefix hit is swapped in.

    def loads_wanted(self) -> tuple[str, ...]:
        """Requests with a hit that own no memory yet, in queue order: candidates for `load_hit`."""
        return self._swapping.wanted()

    def load_hit(self, request_id: str) -> LoadTarget | NoRoom | Rejected:
        """Take blocks for the whole prompt and a slot, and say where the hit goes; the request waits meanwhile."""
        return self._swapping.load(request_id)

    def hit_loaded(self, request_id: str, tokens: int) -> bool:
        """The first `tokens` tokens are in place (0: nothing came, compute from the start). False if it is gone.

        Raises ValueError when `tokens` is not a multiple of the block or exceeds the hit asked for.
        """
        return self._swapping.loaded(request_id, tokens)

    # A prompt is handed from one engine to another.

    def reserve(self, request_id: str, tokens: int, now_us: int) -> Reservation | NoRoom | Rejected:
        """COMPLETION: hold blocks for `tokens` tokens (prompt and first output) and a slot until admit or cancel."""
        return self._receiving.reserve(request_id, tokens, now_us)

    def admit(self, reservation: Reservation, state: TokenState, now_us: int) -> Accepted | Rejected:
        """COMPLETION: the reserved memory is written; decode from `state`. Rejected if no longer reserved."""
        return self._receiving.admit(reservation, state)

    def begin_branches(self, state: TokenState) -> tuple[Event, ...]:
        """COMPLETION: begin the branches of a prompt that was just admitted; nothing may be planned in between."""
        return tuple(begin_branches(self._ledger, state.request.request_id, state.branches, self.eos_token_id))

    def cancel(self, reservation: Reservation) -> bool:
        """COMPLETION: give reserved memory back. False if it was admitted or cancelled before."""
        return self._receiving.cancel(reservation)

    def release(self, request_id: str) -> bool:
        """PROMPT: the hand-off ended, in whatever way; free the prompt's memory. False if it was released before."""
        sequence = self._ledger.handoff.pop(request_id, None)
        if sequence is None:
            return False
        self._ledger.forget(sequence)
        return True

    # One step.

    def ballot(self, now_us: int) -> Ballot:
        """What this rank would like to do next; changes nothing."""
        ledger, rules = self._ledger, self.rules
        reason = wants_prefill(ledger)
        is_idle = not ledger.running and not ledger.arrived
        may_vote = point_of(ledger.decode_step, rules.all_interval, rules.any_interval) is not Point.NONE
        asked = self.config.role is Role.NORMAL and not reason and (may_vote or (is_idle and rules.vote_when_idle))
        return Ballot(
            role=self.config.role,
            decode_step=ledger.decode_step,
            wants=not reason,
            has_result=asked and not select(ledger).is_empty,
            is_idle=is_idle,
            all_interval=rules.all_interval,
            any_interval=rules.any_interval,
            vote_when_idle=rules.vote_when_idle,
            reason=reason,
        )

    def plan(self, verdict: StepKind, now_us: int) -> Plan:
        """Take memory for the next step and say what to compute. Raises ValueError for a verdict against the role."""
        assert self.may_plan, f"step {self._steps} is open: commit it before planning another"
        if VERDICT_OF_ROLE.get(self.config.role, verdict) is not verdict:
            raise ValueError(f"a {self.config.role} engine cannot plan a {verdict} step")
        self._steps += 1
        expire(self._ledger, now_us)
        plan = self._plan_prefill() if verdict is StepKind.PREFILL else self._plan_decode()
        self._open.append(plan)
        return plan

    def _plan_prefill(self) -> Plan:
        self._ledger.decode_step = 0
        prefill = plan_prefill(self._ledger)
        clone_blocks, clone_slots = self._ledger.take_clones()
        return Plan(
            self._steps,
            StepKind.PREFILL,
            tuple(prefill.items),
            tuple(prefill.finished),
            tuple(prefill.dropped),
            clone_blocks=clone_blocks,
            clone_slots=clone_slots,
            reasons=tuple(prefill.reasons),
        )

    def _plan_decode(self) -> Plan:
        self._ledger.decode_step += 1
        decode = plan_decode(self._ledger, self._verify)
        clone_blocks, clone_slots = self._ledger.take_clones()
        return Plan(
            self._steps,
            StepKind.DECODE,
            tuple(decode.items),
            tuple(decode.finished),
            tuple(decode.dropped),
            tuple(decode.preempted),
            clone_blocks=clone_blocks,
            clone_slots=clone_slots,
            behind=self._open[0].step if self._open else 0,
        )

    def commit(self, plan: Plan, result: StepResult, now_us: int) -> tuple[Event, ...]:
        """Apply the result of the oldest open plan; afterwards its items are stale.

        Raises ValueError, and changes nothing, if the result does not fit the plan.
        """
        assert self._open, f"step {plan.step} is not the open one"
        assert plan is self._open[0], f"step {plan.step} is not the oldest open one, that is {self._open[0].step}"
        assert not plan.behind, f"step {plan.step} was planned behind {plan.behind}: fix it up first"
        done = commit_step(self._ledger, plan, result, self.eos_token_id)
        if self._verify is not None and result.times is not None:
            self._verify.feed(result.times)
        for parent_id, firsts in result.branched:
            done += begin_branches(self._ledger, parent_id, firsts, self.eos_token_id)
        events = [*self._collect(plan), *done]
        del self._open[0]
        for later in self._open:
            events += self._collect(later)
        return tuple(events)

    def measured(self, plan: Plan, took_us: float) -> None:
        """The step of a committed plan took so long: what prefill steps cost is learned from it."""
        if plan.kind is StepKind.PREFILL and self.config.step_time_us != STEP_TIME_OFF:
            self._ledger.prefill_cost.measured([Chunk(item.rows, item.start) for item in plan.items], took_us)

    def fix_up(self, plan: Plan, rows: Seq[int] | None = None) -> Plan:
        """Replace a plan made behind a step that is committed now by one with true positions: sample and commit that.

        `rows`: query rows as the device spread them, if it did. A plan behind nothing is returned as it is. Raises
        ValueError, and changes nothing, if the rows are not a spread of the plan's.
        """
        assert self._open, f"step {plan.step} is not open"
        assert plan is self._open[0], f"step {plan.step} waits for the commit of step {plan.behind}, or is not open"
        if plan.behind:
            self._open[0] = fix_up(plan, rows)
        return self._open[0]

    def _collect(self, plan: Plan) -> list[Event]:
        """Free what a plan collected, once; nobody before it is open."""
        if plan.step <= self._collected:
            return []
        self._collected = plan.step
        return collect(self._ledger, plan)

    # What may be read.

    @property
    def may_plan(self) -> bool:
        """Whether the next step may be planned: no step is open, or a decode step alone and steps are pipelined."""
        if not self._open:
            return True
        return self.rules.pipelined and len(self._open) == 1 and self._open[0].kind is StepKind.DECODE

    @property
    def chooses_rows(self) -> bool:
        """Whether rows differ between sequences, so that the device spreads them anew by the latest confidences."""
        return self._verify is not None

    @property
    def open_steps(self) -> int:
        """Steps planned and not committed. When nothing else is left to do, the last one still has to be."""
        return len(self._open)

    @property
    def decode_step(self) -> int:
        """Decode steps since the last prefill step; equal on all ranks of a group."""
        return self._ledger.decode_step

    @decode_step.setter
    def decode_step(self, value: int) -> None:
        self._ledger.decode_step = value

    @property
    def has_work(self) -> bool:
        """Whether stepping can move or report anything: something waits, arrived, runs, or is not collected."""
        return self.unfinished_count > 0

    @property
    def unfinished_count(self) -> int:
        """Sequences waiting, arrived and running, finished ones that are not collected included."""
        return len(self._ledger.waiting) + len(self._ledger.arrived) + len(self._ledger.running)

    @property
    def ledger(self) -> Ledger:
        """Pools and queues, to be read (reports, tests): nobody but this scheduler may write."""
        return self._ledger

    def check(self, held_blocks: tuple[int, ...] = ()) -> None:
        """Assert that memory and sequences are conserved. O(blocks + sequences): for tests and idle times."""
        in_plan = {i.request_id for plan in self._open for i in plan.items}
        in_plan |= {one.request_id for plan in self._open for one in plan.finished}
        copying = [plan for plan in self._open if plan.step > self._collected]
        blocks = (*held_blocks, *(source for plan in copying for source, _ in plan.clone_blocks))
        slots = tuple(source for plan in copying for source, _ in plan.clone_slots)
        self._ledger.check(frozenset(in_plan), blocks, slots)

    def _end(self, request_id: str, reason: FinishReason, detail: str) -> bool:
        sequence = self._ledger.sequences.get(request_id)
        if sequence is None or sequence.phase in (Phase.FINISHED, Phase.HANDOFF):
            return False
        sequence.finish(reason, detail)
        return True
