"""Who owns what on one rank: the pools, the queues, and the moves that take or give back memory."""

from collections import deque
from typing import NamedTuple

import numpy as np
from shoal.engines.config import EngineConfig, Role
from shoal.engines.core.blocks import Availability, BlockPool
from shoal.engines.core.drafts import DraftSlots
from shoal.engines.core.layout import blocks_needed
from shoal.engines.core.plan import Ended, Reservation
from shoal.engines.core.prefill_cost import PrefillCost
from shoal.engines.core.request import FinishReason, NoRoom
from shoal.engines.core.rules import SchedulingRules, prompt_limit, step_room
from shoal.engines.core.sequence import Phase, Sequence


class Clone(NamedTuple):
    """Copies (source, target) that make a branch's memory its own; each source has a reference until they are done."""

    branch: Sequence
    blocks: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]


class Ledger:
    """The mutable state of one rank's scheduler; the planners read it and move sequences between its queues.

    `waiting`: prompts to compute, loading ones included. `arrived`: prefilled elsewhere, admitted next. `running`:
    in decode, and finished ones not yet collected. `handoff`: prompts done, owned until released. A sequence of the
    open plan's prefill is in none of them. `sequences` finds all by request id.
    """

    def __init__(self, config: EngineConfig, rules: SchedulingRules, keeps_rates: bool) -> None:
        """`keeps_rates`: somebody chooses rows by the acceptance rates of drafts."""
        self.config = config
        self.rules = rules
        self.keeps_rates = keeps_rates
        self.blocks = BlockPool(config.cache.blocks_count)
        self.slots = BlockPool(config.cache.slots_count)
        self.draft_slots = DraftSlots(config.sequences_max if rules.drafts else 0)
        self.pads = (rules.pad_token_id,) * rules.drafts  # what is verified where no drafts were made
        self.prefill_cost = PrefillCost()
        self.sequences: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.arrived: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.handoff: dict[str, Sequence] = {}
        self.reservations: dict[str, Reservation] = {}
        self.clones: list[Clone] = []  # for the next plan
        self.arrivals = 0
        self.present: dict[str, int] = {}  # sequences of each user
        self.served: dict[str, int] = {}  # tokens of users: prompts given memory, outputs of ended sequences
        self.decode_step = 0

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return blocks_needed(tokens, self.config.cache.block_tokens)

    def is_below_watermark(self) -> bool:
        """Whether new prompts may take memory: used share, null block included, in single precision (notes 2)."""
        used = (self.blocks.count - self.blocks.free_count) / self.blocks.count
        return bool(np.float32(used) <= np.float32(self.config.watermark))

    def refusal(self, tokens: int, sequence: Sequence) -> str:
        """Why a sequence of `tokens` tokens can never be computed here, with the rule and the remedy; "" if it can."""
        limit = prompt_limit(self.config, self.rules)
        if tokens > limit:
            return f"{tokens} tokens exceed the limit of {limit}: shorten the prompt or raise max_model_len"
        wanted = self.blocks_of(tokens)
        if self.blocks.availability(wanted) is Availability.NEVER:
            return (
                f"{tokens} tokens need {wanted} blocks and the engine has {self.blocks.count - 1}: shorten the prompt"
            )
        room = step_room(self.config, self.rules)
        for span in sequence.request.images:
            if span.length > room:
                return (
                    f"the image at token {span.start} takes {span.length} tokens and a step has room for {room}: "
                    "an image is computed whole; scale it down or raise step_tokens_max"
                )
        return ""

    def shortage(self, tokens: int) -> NoRoom | None:
        """What is missing now for a sequence of `tokens` tokens; None if it fits."""
        blocks_short = max(0, self.blocks_of(tokens) - self.blocks.free_count)
        slots_short = max(0, 1 - self.slots.free_count)
        return NoRoom(blocks_short, slots_short) if blocks_short or slots_short else None

    def take(self, sequence: Sequence) -> None:
        """Give a sequence blocks for all its tokens, and a slot."""
        assert not sequence.block_table, f"{sequence.request_id} takes memory twice"
        self.serve(sequence.request.user, sequence.len)
        sequence.block_table = self.blocks.allocate(self.blocks_of(sequence.len))
        sequence.slot = self.slots.allocate(1)[0]

    def enter(self, sequence: Sequence) -> None:
        """A new prompt joins the queue."""
        self.add(sequence)
        self.arrivals += 1
        sequence.arrival = self.arrivals
        self.waiting.append(sequence)

    def add(self, sequence: Sequence) -> None:
        """Know a sequence from now on. A user who was away starts level with the least served of those who are here.

        So nobody saves up a share while asking for nothing (a virtual token counter).
        """
        user = sequence.request.user
        if user not in self.present:
            self.served[user] = min((self.served.get(name, 0) for name in self.present), default=0)
        self.present[user] = self.present.get(user, 0) + 1
        self.sequences[sequence.request_id] = sequence

    def serve(self, user: str, tokens: int) -> None:
        """Charge a user for tokens."""
        self.served[user] = self.served.get(user, 0) + tokens

    def take_draft_slot(self, sequence: Sequence) -> None:
        """Give a sequence that will decode a place for its draft info; nothing where no drafts are made."""
        if self.rules.drafts:
            assert not sequence.draft_slot, f"{sequence.request_id} takes a draft slot twice"
            sequence.draft_slot = self.draft_slots.take()

    def return_draft_slot(self, sequence: Sequence) -> None:
        """Take a sequence's draft slot back, if it has one; a step in flight may still write it, in stream order."""
        if sequence.draft_slot:
            self.draft_slots.give_back(sequence.draft_slot)
            sequence.draft_slot = 0
            sequence.has_draft_info = False

    def give_back(self, sequence: Sequence) -> None:
        """Free whatever a sequence owns: draft slot, slot, then blocks from the last to the first."""
        self.return_draft_slot(sequence)
        if sequence.slot:
            self.slots.free((sequence.slot,))
            sequence.slot = 0
        if sequence.block_table:
            self.blocks.free(sequence.block_table)
            sequence.block_table = []

    def take_clones(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Block and slot copies of branches that still own their memory; the others' sources are freed."""
        if not self.clones:
            return (), ()
        gone = [clone for clone in self.clones if not clone.branch.block_table]
        kept = [clone for clone in self.clones if clone.branch.block_table]
        for clone in gone:
            self.slots.free([source for source, _ in clone.slots])
            self.blocks.free([source for source, _ in clone.blocks])
        self.clones = []
        return tuple(p for clone in kept for p in clone.blocks), tuple(p for clone in kept for p in clone.slots)

    def may_recompute(self, sequence: Sequence) -> bool:
        """Whether a sequence that lost its memory can be computed again from its start."""
        config = self.config
        return config.recompute_preempted and config.role is Role.NORMAL and not sequence.is_constrained

    def drop(self, sequence: Sequence) -> Ended:
        """Forget a finished sequence of no queue and free its memory now."""
        self.forget(sequence)
        return ended(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what a sequence owns, charge its user for its output, and know it no more."""
        self.give_back(sequence)
        user = sequence.request.user
        self.serve(user, len(sequence.output))
        self.present[user] -= 1
        if not self.present[user]:
            del self.present[user], self.served[user]
        del self.sequences[sequence.request_id]

    def refuse(self, sequence: Sequence, detail: str) -> Ended:
        """End and forget a waiting sequence, already out of the queue, that can never be computed."""
        sequence.finish(FinishReason.REFUSED, detail)
        return self.drop(sequence)

    def sweep_waiting(self) -> list[Ended]:
        """Take every dead sequence out of the waiting queue and free it."""
        dead = [sequence for sequence in self.waiting if sequence.is_finished]
        if dead:
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_finished)
        return [self.drop(sequence) for sequence in dead]

    def collect_finished(self) -> list[Ended]:
        """Take finished sequences out of `running`; their memory stays theirs until the plan is committed."""
        ended_phase = Phase.FINISHED  # looked up once: every step looks at every sequence
        finished = [sequence for sequence in self.running if sequence.phase is ended_phase]
        if finished:
            self.running = [sequence for sequence in self.running if not sequence.is_finished]
            for sequence in finished:
                self.return_draft_slot(sequence)
        return [ended(sequence) for sequence in finished]

    def check(
        self, in_plan: frozenset[str], held_blocks: tuple[int, ...] = (), held_slots: tuple[int, ...] = ()
    ) -> None:
        """Assert that nothing is lost or owned twice.

        `in_plan`: request ids of open plans; `held_blocks`, `held_slots`: ids that are referred to from elsewhere.
        """
        held_blocks += tuple(source for clone in self.clones for source, _ in clone.blocks)
        held_slots += tuple(source for clone in self.clones for source, _ in clone.slots)
        owners = list(self.sequences.values())
        held = self.reservations.values()
        self.blocks.check(
            [*held_blocks, *(b for s in owners for b in s.block_table), *(b for r in held for b in r.blocks)]
        )
        self.slots.check([*held_slots, *(s.slot for s in owners if s.slot), *(r.slot for r in held)])
        self.draft_slots.check([s.draft_slot for s in owners if s.draft_slot])
        places = [*self.waiting, *self.arrived, *self.running, *self.handoff.values()]
        placed = {id(s) for s in places}
        assert len(placed) == len(places), f"a sequence is in two queues: {[s.request_id for s in places]}"
        known = {id(s) for s in owners}
        assert sum(self.present.values()) == len(owners), f"{len(owners)} sequences of users {self.present}"
        assert placed <= known, "a queue holds a forgotten sequence"
        lost = known - placed - {id(s) for s in owners if s.request_id in in_plan}
        assert not lost, f"in no queue: {[s.request_id for s in owners if id(s) in lost]}"
        for sequence in owners:
            self._check_sequence(sequence)
        active = [s for s in self.running if not s.is_finished]
        assert len(active) <= self.config.sequences_max, f"{len(active)} run, at most {self.config.sequences_max} may"

    def _check_sequence(self, sequence: Sequence) -> None:
        name, phase = sequence.request_id, sequence.phase
        assert 0 <= sequence.cached <= sequence.len, f"{name}: cached {sequence.cached} of {sequence.len} tokens"
        assert bool(sequence.slot) == bool(sequence.block_table), f"{name} owns blocks without a slot or reversed"
        room = len(sequence.block_table) * self.config.cache.block_tokens
        assert sequence.cached <= room, f"{name}: {sequence.cached} tokens cached in blocks for {room}"
        if phase in (Phase.RUNNING, Phase.ARRIVED, Phase.HANDOFF):
            assert sequence.cached == sequence.len - 1, (
                f"{name}: {phase} with {sequence.cached} of {sequence.len} cached"
            )
        if self.config.role is Role.COMPLETION:
            assert phase in (Phase.ARRIVED, Phase.RUNNING, Phase.FINISHED), f"{name} is {phase} in a decode engine"


def ended(sequence: Sequence) -> Ended:
    """How a finished sequence ended."""
    assert sequence.reason is not None, f"{sequence.request_id} is reported as ended while {sequence.phase}"
    return Ended(sequence.request_id, sequence.reason, sequence.output_tokens, sequence.detail)
