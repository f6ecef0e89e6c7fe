"""An engine's load, told to its role's balancer, with the sequences that have become real since the last time."""

import asyncio
import logging

from ray.exceptions import RayError
from shoal.balancers.reports import DecodeReport, GroupRef, PrefillReport
from shoal.cluster.live.names import COMPLETION, DECODE_BALANCER, PREFILL_BALANCER, role_of
from shoal.cluster.live.sequences import Sequences
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.surroundings import Members
from shoal.engines.run.output import Capacity

log = logging.getLogger(__name__)

SEND_S = 1.0


class Reports:
    """Numbered reports of one engine."""

    def __init__(self, spec: ClusterSpec, group: GroupRef, sequences: Sequences) -> None:
        self._spec, self._group, self._sequences = spec, group, sequences
        self._seq = 0

    async def send(self, directory: Members, capacity: Capacity, tokens_per_s: float) -> None:
        """Send one report, if there is a balancer; what it did not hear of is told with the next."""
        is_decode = role_of(self._group) == COMPLETION
        balancer = directory.only(DECODE_BALANCER if is_decode else PREFILL_BALANCER)
        if balancer is None:
            return
        self._seq += 1
        known = self._sequences.take_fresh()
        report: DecodeReport | PrefillReport
        if is_decode:
            config = self._spec.engine(COMPLETION)
            report = DecodeReport(
                group=self._group, seq=self._seq,
                blocks_free=capacity.blocks_free, blocks_total=capacity.blocks_count,
                slots_free=capacity.slots_free, sequences=capacity.running + capacity.reserved,
                sequences_max=config.sequences_max, context_tokens=capacity.context_tokens, known=known,
            )  # fmt: skip
        else:
            report = PrefillReport(
                group=self._group, seq=self._seq, waiting_tokens=capacity.uncached_tokens,
                waiting_requests=capacity.waiting, tokens_per_s=tokens_per_s, known=known,
            )  # fmt: skip
        try:
            await asyncio.wait_for(balancer.report.remote(report), timeout=SEND_S)
        except (RayError, TimeoutError):
            self._sequences.give_back_fresh(known)
            log.debug("balancer did not take report %d", self._seq)
