"""Ways into an engine other than its queue: a prefix swapped in from the store, a prompt prefilled elsewhere."""

from shoal.engines.config import Role
from shoal.engines.core.blocks import Availability
from shoal.engines.core.ledger import Ledger
from shoal.engines.core.plan import Accepted, LoadTarget, Reservation
from shoal.engines.core.request import NoRoom, Rejected, TokenState
from shoal.engines.core.sequence import Phase, Sequence


class Swapping:
    """Prefix hits on their way in. A loading request owns its memory and cannot be scheduled until it is told."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def wanted(self) -> tuple[str, ...]:
        """Requests with a hit that own no memory yet, in queue order."""
        return tuple(s.request_id for s in self._ledger.waiting if s.phase is Phase.WAITING and s.wants_load)

    def load(self, request_id: str) -> LoadTarget | NoRoom | Rejected:
        """Take memory for the whole prompt; NoRoom also above the watermark, which keeps decode supplied."""
        ledger = self._ledger
        sequence = ledger.sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.WAITING or not sequence.wants_load:
            return Rejected(request_id, "no hit of this request waits to be loaded")
        detail = ledger.refusal(sequence.len, sequence)
        if detail:
            return Rejected(request_id, detail)
        short = ledger.shortage(sequence.len)
        if short is not None:
            return short
        if ledger.config.role is Role.NORMAL and not ledger.is_below_watermark():
            return NoRoom()
        ledger.take(sequence)
        sequence.wants_load = False
        sequence.move(Phase.LOADING)
        tokens = sequence.request.hit_tokens
        blocks = tuple(sequence.block_table[: ledger.blocks_of(tokens)])
        return LoadTarget(request_id, tokens, blocks, sequence.slot)

    def loaded(self, request_id: str, tokens: int) -> bool:
        """The load ended with `tokens` tokens in place; a request that was never loaded may only be told 0."""
        sequence = self._ledger.sequences.get(request_id)
        if sequence is None or sequence.is_finished:
            return False
        asked, block_tokens = sequence.request.hit_tokens, self._ledger.config.cache.block_tokens
        if tokens % block_tokens or not 0 <= tokens <= asked:
            raise ValueError(
                f"{request_id}: tokens = {tokens} must be a multiple of block_tokens = {block_tokens} in 0..{asked}"
            )
        if sequence.phase is Phase.WAITING and sequence.wants_load and not tokens:
            sequence.wants_load = False
            return True
        sequence.move(Phase.WAITING)
        sequence.cached = tokens
        return True


class Receiving:
    """Memory of a COMPLETION engine held for prompts that are still being prefilled elsewhere."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def reserve(self, request_id: str, tokens: int, now_us: int) -> Reservation | NoRoom | Rejected:
        """Blocks for `tokens` tokens, a slot, and a place among the running sequences."""
        ledger = self._ledger
        if ledger.config.role is not Role.COMPLETION:
            raise ValueError(f"reserve({request_id!r}) on a {ledger.config.role} engine: only completion receives")
        if request_id in ledger.sequences or request_id in ledger.reservations:
            return Rejected(request_id, f"request_id {request_id!r} is in use")
        wanted = ledger.blocks_of(tokens)
        if tokens < 2 or tokens > ledger.config.max_model_len:
            return Rejected(
                request_id, f"tokens = {tokens} must lie in 2..max_model_len = {ledger.config.max_model_len}"
            )
        if ledger.blocks.availability(wanted) is Availability.NEVER:
            return Rejected(
                request_id, f"{tokens} tokens need {wanted} blocks, the engine has {ledger.blocks.count - 1}"
            )
        taken = len(ledger.running) + len(ledger.arrived) + len(ledger.reservations)
        short = ledger.shortage(tokens) or NoRoom()
        places_short = max(0, taken + 1 - ledger.config.sequences_max)
        if places_short or short.blocks_short or short.slots_short:
            return NoRoom(short.blocks_short, short.slots_short, places_short)
        blocks = tuple(ledger.blocks.allocate(wanted))
        reservation = Reservation(request_id, tokens, blocks, ledger.slots.allocate(1)[0], now_us)
        ledger.reservations[request_id] = reservation
        return reservation

    def admit(self, reservation: Reservation, state: TokenState) -> Accepted | Rejected:
        """Turn reserved memory into a sequence that decodes from the next step on.

        Raises ValueError when the state is of another request or has not as many tokens as reserved for.
        """
        ledger, request_id = self._ledger, reservation.request_id
        if state.request.request_id != request_id or len(state.token_ids) != reservation.tokens:
            raise ValueError(
                f"state of {state.request.request_id!r} with {len(state.token_ids)} tokens does not fit the "
                f"reservation of {request_id!r} for {reservation.tokens}"
            )
        if ledger.reservations.get(request_id) != reservation:
            return Rejected(request_id, "not reserved any more: reserve again")
        given = len(state.request.token_ids)
        if state.token_ids[:given] != state.request.token_ids:
            raise ValueError(f"state of {request_id!r}: token_ids must begin with those of its request")
        del ledger.reservations[request_id]
        sequence = Sequence(state.request, phase=Phase.ARRIVED)
        for token_id in state.token_ids[given:]:
            sequence.push(token_id)
        sequence.cached = state.cached
        sequence.block_table = list(reservation.blocks)
        sequence.slot = reservation.slot
        ledger.add(sequence)
        ledger.arrived.append(sequence)
        return Accepted(request_id)

    def cancel(self, reservation: Reservation) -> bool:
        """Free reserved memory, once."""
        if self._ledger.reservations.get(reservation.request_id) != reservation:
            return False
        del self._ledger.reservations[reservation.request_id]
        self._ledger.slots.free((reservation.slot,))
        self._ledger.blocks.free(reservation.blocks)
        return True
