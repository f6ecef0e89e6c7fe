"""Branch a sequence: the branch shares the computed blocks and copies only what the two would write differently.

A branch of a sequence that may still run takes its own slot, and its own copy of a partly filled last block, at once,
so the parent can go on. A branch of one that has ended waits with shares of both, and settles them when it is
admitted: it copies what others still share and adopts what is its alone.
"""

from dataclasses import replace

from shoal.engines.core.ledger import Clone, Ledger
from shoal.engines.core.plan import Accepted
from shoal.engines.core.request import EngineRequest, FinishReason, NoRoom, Rejected, SamplingParams
from shoal.engines.core.sequence import Phase, Sequence


def fork(
    ledger: Ledger, parent_id: str, request_id: str, sampling: SamplingParams, prompt_len: int | None
) -> Accepted | NoRoom | Rejected:
    """Branch a sequence under an id of its own; NoRoom and Rejected change nothing."""
    parent = ledger.sequences.get(parent_id)
    if parent is None:
        return Rejected(request_id, f"{parent_id!r} has nothing computed here to branch from")
    return branch(ledger, parent, _branch_request(parent, request_id, sampling, prompt_len))


def branch(ledger: Ledger, parent: Sequence, request: EngineRequest) -> Accepted | NoRoom | Rejected:
    """As `fork`, for a request that begins with all tokens the parent has computed, and may go on otherwise."""
    parent_id, request_id, sampling = parent.request_id, request.request_id, request.sampling
    if request_id in ledger.sequences or request_id in ledger.reservations:
        return Rejected(request_id, f"request_id {request_id!r} is in use")
    if not parent.cached or not parent.block_table or parent.phase is Phase.LOADING:
        return Rejected(request_id, f"{parent_id!r} has nothing computed here to branch from")
    if parent.open_steps:
        return Rejected(request_id, f"a step of {parent_id!r} is open and changes its slot: branch after its commit")
    if parent.is_sharing or any(clone.branch is parent for clone in ledger.clones):
        return Rejected(request_id, f"{parent_id!r} waits for copies of its own: branch after its first step")
    length = len(request.token_ids)
    if length > ledger.config.max_model_len or length - request.prompt_len >= sampling.max_tokens:
        limits = f"max_model_len = {ledger.config.max_model_len} and max_tokens = {sampling.max_tokens}"
        return Rejected(request_id, f"{parent_id!r} has {length} tokens, which leaves nothing to produce of {limits}")
    sequence = Sequence(request, is_waiting_for_images=parent.is_waiting_for_images)
    sequence.cached = min(parent.cached, length - 1)
    is_complete = sequence.cached == length - 1
    is_final = parent.is_finished or parent.phase is Phase.HANDOFF
    _share(ledger, parent, sequence)
    if not (is_final and is_complete):
        short = _shortage(ledger, sequence)
        if short is not None:
            ledger.give_back(sequence)
            return short
        settle(ledger, sequence)
    if is_complete:
        sequence.phase = Phase.ARRIVED
        ledger.arrived.append(sequence)
    else:
        ledger.waiting.appendleft(sequence)
    ledger.add(sequence)
    return Accepted(request_id)


def may_settle(ledger: Ledger, branch: Sequence) -> bool:
    """Whether what a waiting branch has to copy can be had now. The published engine asks for both, always."""
    if ledger.rules.adopt_when_sole:
        return _shortage(ledger, branch) is None
    return ledger.blocks.free_count > 0 and ledger.slots.free_count > 0


def settle(ledger: Ledger, branch: Sequence) -> None:
    """Give a branch what it will write: a slot, a last block if partly filled, and blocks for tokens not computed."""
    adopts = ledger.rules.adopt_when_sole
    blocks: tuple[tuple[int, int], ...] = ()
    slots: tuple[tuple[int, int], ...] = ()
    if branch.cached % ledger.config.cache.block_tokens:
        old = branch.block_table[-1]
        if not adopts or ledger.blocks.references_of(old) > 1:
            branch.block_table[-1] = ledger.blocks.allocate(1)[0]
            blocks = ((old, branch.block_table[-1]),)
    branch.block_table += ledger.blocks.allocate(_blocks_missing(ledger, branch))
    if not adopts or ledger.slots.references_of(branch.slot) > 1:
        old, branch.slot = branch.slot, ledger.slots.allocate(1)[0]
        slots = ((old, branch.slot),)
    branch.is_sharing = False
    if blocks or slots:
        ledger.clones.append(Clone(branch, blocks, slots))


def give_up(ledger: Ledger, branch: Sequence) -> bool:
    """Drop the shares of a branch that nobody can make room for; true if it is computed again from its start."""
    ledger.give_back(branch)
    branch.is_sharing = False
    if ledger.may_recompute(branch):
        branch.restart()
        ledger.waiting.appendleft(branch)
        return True
    branch.finish(FinishReason.PREEMPTED, "there is no room for a copy of its slot")
    return False


def _branch_request(
    parent: Sequence, request_id: str, sampling: SamplingParams, prompt_len: int | None
) -> EngineRequest:
    return replace(
        parent.request,
        request_id=request_id,
        token_ids=parent.token_slice(0, parent.len),
        prompt_len=parent.prompt_len if prompt_len is None else prompt_len,
        sampling=sampling,
        hit_tokens=0,
        checkpoints=(),
        branches=(),
    )


def _share(ledger: Ledger, parent: Sequence, branch: Sequence) -> None:
    branch.block_table = parent.block_table[: ledger.blocks_of(branch.cached)]
    branch.slot = parent.slot
    branch.is_sharing = True
    for one in branch.block_table:
        ledger.blocks.pin(one)
    ledger.slots.pin(branch.slot)


def _blocks_missing(ledger: Ledger, branch: Sequence) -> int:
    """Blocks for prompt tokens that are not computed yet; a complete branch takes its next block as it decodes."""
    if branch.cached == branch.len - 1:
        return 0
    return max(0, ledger.blocks_of(branch.len) - len(branch.block_table))


def _shortage(ledger: Ledger, branch: Sequence) -> NoRoom | None:
    is_partial = branch.cached % ledger.config.cache.block_tokens > 0
    copies = is_partial and ledger.blocks.references_of(branch.block_table[-1]) > 1
    blocks_short = max(0, int(copies) + _blocks_missing(ledger, branch) - ledger.blocks.free_count)
    slots_short = 1 if ledger.slots.references_of(branch.slot) > 1 and not ledger.slots.free_count else 0
    return NoRoom(blocks_short, slots_short) if blocks_short or slots_short else None
