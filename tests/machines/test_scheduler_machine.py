"""Random programs on a whole scheduler: nothing leaks, every request ends once, and tokens do not depend on luck."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shoal.engines.config import Role
from shoal.engines.core.plan import Accepted, Branched, ChunkDone, LoadTarget, PromptDone, Reservation, StepKind
from shoal.engines.core.request import (
    Branch,
    BranchToken,
    FinishEvent,
    FinishReason,
    ImageSpan,
    SamplingParams,
    TokensEvent,
    TokenState,
)

from tests.engines.core.desk import Desk, config_of, next_token, request_of
from tests.engines.core.memory_model import MemoryModel
from tests.engines.core.pipeline_desk import PipelineDesk

STEPS_TO_DRAIN = 5000


class SomeRows:
    """Verifies a number of drafts that changes from step to step and from sequence to sequence."""

    def __init__(self, drafts, pipelined):
        self.drafts = drafts
        self.pipelined = pipelined

    def choose(self, sequences):
        assert sequences
        assert all(s.process_count <= s.schedule_count <= s.process_count + self.pipelined for s in sequences)
        return [1 + (s.len * 7 + s.process_count) % (1 + self.drafts) for s in sequences]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, loaded, reserved, admitted and released at any moment, also within a step."""

    role = Role.NORMAL
    budgets = (6, 16, 64)
    drafts = st.just(0)
    pipelined = False

    def __init__(self):
        super().__init__()
        self.count = 0
        self.open_plans = []
        self.requests = {}
        self.reservations = {}
        self.loading = {}
        self.handoffs = set()
        self.cancelled = set()

    @initialize(
        blocks=st.sampled_from([6, 9, 20]),
        slots=st.sampled_from([3, 6]),
        budget=st.sampled_from([0, 1, 2]),
        watermark=st.sampled_from([0.5, 0.9, 1.0]),
        recompute=st.booleans(),
        data=st.data(),
    )
    def build(self, blocks, slots, budget, watermark, recompute, data):
        budget = self.budgets[budget]
        config = config_of(
            self.role, blocks, slots, step_tokens_max=budget, watermark=watermark, recompute_preempted=recompute
        )
        drafts = data.draw(self.drafts)
        verify = data.draw(st.sampled_from([None, SomeRows(drafts, self.pipelined)])) if drafts else None
        rules = {"all_interval": 3, "any_interval": 5, "drafts": drafts, "pipelined": self.pipelined}
        rules["overtaken_max"] = data.draw(st.integers(0, 3))
        self.desk = (PipelineDesk if self.pipelined else Desk).open(config, verify, **rules)
        self.memory = self.desk.memory = MemoryModel()
        self.scheduler = self.desk.scheduler

    def new_id(self):
        self.count += 1
        return f"r{self.count}"

    @precondition(lambda self: self.role is not Role.COMPLETION)
    @rule(
        length=st.integers(1, 120),
        max_tokens=st.integers(1, 40),
        hit=st.integers(0, 4),
        image=st.none() | st.tuples(st.integers(0, 60), st.integers(4, 20)),
        pending=st.booleans(),
        checkpoints=st.lists(st.integers(1, 130), max_size=3, unique=True),
        wishes=st.fixed_dictionaries(
            {}, optional={"priority": st.integers(-1, 1), "user": st.sampled_from("uv"), "deadline_us": st.just(9)}
        ),
        branches=st.just(0) | st.integers(1, 3),
    )
    def submit(self, length, max_tokens, hit, image, pending, checkpoints, wishes, branches):
        spans = () if image is None else (ImageSpan(image[0], image[1], 1, image[1] - 3, b"d"),)
        fields = {"images": spans, "hit_tokens": 16 * hit, "checkpoints": tuple(sorted(checkpoints)), **wishes}
        fields["branches"] = tuple(Branch(self.new_id(), seed) for seed in range(branches))
        request = request_of(self.new_id(), length, max_tokens=max_tokens, **fields)
        answer = self.scheduler.submit(request, 0, images_pending=pending)
        if isinstance(answer, Accepted):
            self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def images_arrive(self, data):
        self.scheduler.set_schedulable(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(data=st.data())
    def load(self, data):
        for request_id in self.scheduler.loads_wanted():
            target = self.scheduler.load_hit(request_id)
            if isinstance(target, LoadTarget):
                assert len(target.blocks) == target.tokens // 16
                self.loading[request_id] = target

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.loading)))
        self.load_ends(request_id, 16 * data.draw(st.integers(0, self.loading[request_id].tokens // 16)))

    def load_ends(self, request_id, tokens):
        target = self.loading.pop(request_id)
        if self.scheduler.hit_loaded(request_id, tokens):
            self.memory.place(target.blocks, target.slot, self.requests[request_id].token_ids[:tokens])

    @precondition(lambda self: self.role is Role.COMPLETION)
    @rule(length=st.integers(1, 120), max_tokens=st.integers(2, 40), branches=st.integers(0, 3))
    def reserve(self, length, max_tokens, branches):
        others = tuple(Branch(self.new_id(), seed) for seed in range(branches))
        request = request_of(self.new_id(), length, max_tokens=max_tokens, branches=others)
        answer = self.scheduler.reserve(request.request_id, length + 1, 0)
        if isinstance(answer, Reservation):
            self.reservations[request.request_id] = (request, answer)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), admits=st.booleans())
    def settle(self, data, admits):
        request, reservation = self.reservations.pop(data.draw(st.sampled_from(sorted(self.reservations))))
        if not admits:
            assert self.scheduler.cancel(reservation)
            return
        first = next_token(request.request_id, len(request.token_ids))
        firsts = ((b.request_id, b.seed, next_token(b.request_id, request.prompt_len)) for b in request.branches)
        state = TokenState(request, (*request.token_ids, first), tuple(BranchToken(*one) for one in firsts))
        answer = self.scheduler.admit(reservation, state, 0)
        assert isinstance(answer, Accepted)
        self.requests[request.request_id] = request
        self.memory.place(reservation.blocks, reservation.slot, request.token_ids)
        events = self.scheduler.begin_branches(state)
        assert len([e for e in events if isinstance(e, Branched)]) == len(request.branches)
        self.desk.events += events
        self.settle_events(events)

    @precondition(lambda self: self.role is not Role.PROMPT and self.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 60))
    def fork(self, data, max_tokens):
        parent = data.draw(st.sampled_from(sorted(self.requests)))
        branch = self.new_id()
        answer = self.scheduler.fork(parent, branch, SamplingParams(max_tokens=max_tokens))
        if isinstance(answer, Accepted):
            self.requests[branch] = self.scheduler.ledger.sequences[branch].request

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.handoffs)))
        self.handoffs.remove(request_id)
        assert self.scheduler.release(request_id)

    @precondition(lambda self: self.scheduler.may_plan)
    @rule()
    def plan(self):
        self.open_plans.append(self.desk.plan())
        self.inspect(self.open_plans[-1])

    @precondition(lambda self: self.open_plans)
    @rule()
    def commit(self):
        self.settle_events(self.desk.commit(self.open_plans[0]))
        del self.open_plans[0]

    @precondition(lambda self: self.open_plans)
    @rule(data=st.data())
    def commit_with_a_failure(self, data):
        names = [i.request_id for i in self.open_plans[0].items]
        failed = [(data.draw(st.sampled_from(names)), "no finite logits")] if names else []
        self.settle_events(self.desk.commit(self.open_plans[0], failed=failed))
        del self.open_plans[0]

    @precondition(lambda self: self.scheduler.may_plan)
    @rule(steps=st.integers(1, 12))
    def run_some(self, steps):
        """Steps as an engine makes them: one stays open if they are pipelined and it decodes."""
        for _ in range(steps):
            while not self.scheduler.may_plan:
                self.commit()
            self.plan()
            kept = 1 if self.pipelined and self.open_plans[-1].kind is StepKind.DECODE else 0
            while len(self.open_plans) > kept:
                self.commit()

    def settle_events(self, events):
        for event in events:
            if isinstance(event, PromptDone):
                self.handoffs.add(event.request_id)
            elif isinstance(event, Branched):
                if not event.refusal:
                    computed = replace(event.request, token_ids=event.request.token_ids[:-1])
                    self.requests[computed.request_id] = computed  # its first token comes as an event
            elif isinstance(event, TokensEvent):
                sequence_len = self.requests[event.request_id].prompt_len + event.index
                for length, token_id in enumerate(event.token_ids, sequence_len):
                    assert token_id == next_token(event.request_id, length)
            elif isinstance(event, ChunkDone):
                request = self.requests[event.request_id]
                assert not [s for s in request.images if s.start < event.cached < s.end]

    def inspect(self, plan):
        config = self.scheduler.config
        assert plan.rows <= config.step_tokens_max
        if plan.kind is StepKind.DECODE:
            assert len(plan.items) <= config.sequences_max
            assert self.role is not Role.PROMPT
            lengths = [i.sequence.len for i in plan.items]
            assert lengths == sorted(lengths, reverse=True)
        else:
            assert self.role is not Role.COMPLETION
        slots = [i.slot for i in plan.items]
        assert 0 not in slots
        assert len(set(slots)) == len(slots)
        for item in plan.items:
            assert item.rows > 0
            assert item.end <= 16 * len(item.block_table)
            if not plan.behind:
                assert len(item.token_ids) == item.rows
            assert item.read_slot in (0, item.write_slot)
            if plan.kind is StepKind.DECODE:
                assert bool(item.write_slot) == bool(self.scheduler.rules.drafts)
                assert len(item.sequence.drafts) == self.scheduler.rules.drafts
            assert not item.sequence.is_waiting_for_images

    @invariant()
    def conserves(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            ended = [e.request_id for e in self.desk.events if isinstance(e, FinishEvent | PromptDone)]
            assert len(ended) == len(set(ended)), f"ended twice: {ended}"

    def teardown(self):
        """No more faults: everybody must finish and all memory must come back."""
        if not hasattr(self, "scheduler"):
            return
        self.flush()
        for _, reservation in self.reservations.values():
            self.scheduler.cancel(reservation)
        for request_id in self.requests:
            self.scheduler.set_schedulable(request_id)
        for _ in range(STEPS_TO_DRAIN):
            for request_id in sorted(self.loading):
                self.load_ends(request_id, self.loading[request_id].tokens)
            self.load(None)
            for request_id in sorted(self.handoffs):
                self.release_one(request_id)
            if not self.scheduler.has_work:
                break
            self.run_some(1)
        self.flush()
        assert not self.scheduler.has_work, f"stuck: {self.desk.waiting()} {self.desk.running()}"
        config = self.scheduler.config.cache
        assert self.desk.free() == (config.blocks_count - 1, config.slots_count - 1)
        self.every_request_ended()

    def flush(self):
        while self.open_plans:
            self.commit()

    def release_one(self, request_id):
        self.handoffs.remove(request_id)
        self.scheduler.release(request_id)

    def every_request_ended(self):
        done = {e.request_id for e in self.desk.events if isinstance(e, PromptDone)}
        for request_id, request in self.requests.items():
            ending = self.desk.ending_of(request_id)
            assert (ending is not None) != (request_id in done), f"{request_id} has no end or two"
            if ending is FinishReason.LENGTH and self.role is Role.NORMAL:
                total = len(request.token_ids) + len(self.desk.tokens_of(request_id))
                assert total == min(request.prompt_len + request.sampling.max_tokens, 257)


class DraftMachine(SchedulerMachine):
    """Every decode step verifies drafts, some or all of those held; the tokens are the same."""

    budgets = (24, 40, 64)
    drafts = st.integers(1, 5)


class CompletionDraftMachine(DraftMachine):
    role = Role.COMPLETION


class PipelineMachine(DraftMachine):
    """Decode steps overlap; whatever happens between a plan and its commit, the tokens are the same."""

    drafts = st.integers(0, 5)
    pipelined = True


class CompletionPipelineMachine(PipelineMachine):
    role = Role.COMPLETION


class PromptMachine(SchedulerMachine):
    role = Role.PROMPT


class CompletionMachine(SchedulerMachine):
    role = Role.COMPLETION


SETTINGS = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNormalScheduler = SchedulerMachine.TestCase
TestNormalScheduler.settings = SETTINGS
TestPromptScheduler = PromptMachine.TestCase
TestPromptScheduler.settings = SETTINGS
TestCompletionScheduler = CompletionMachine.TestCase
TestCompletionScheduler.settings = SETTINGS
TestDraftScheduler = DraftMachine.TestCase
TestDraftScheduler.settings = SETTINGS
TestCompletionDraftScheduler = CompletionDraftMachine.TestCase
TestCompletionDraftScheduler.settings = SETTINGS
TestPipelineScheduler = PipelineMachine.TestCase
TestPipelineScheduler.settings = SETTINGS
TestCompletionPipelineScheduler = CompletionPipelineMachine.TestCase
TestCompletionPipelineScheduler.settings = SETTINGS
