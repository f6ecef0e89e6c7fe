"""What a balancer's refusal means to a client, and when it is a reason to wait instead."""

from shoal.balancers.config import DEADLINE, NO_GROUP, QUEUE, ROOM, TOO_LONG
from shoal.balancers.reports import Full
from shoal.cluster.core.messages import Failure
from shoal.engines.core.request import Rejected

RETRY_AFTER_LEAST_US = 1_000_000  # Retry-After counts whole seconds


def may_wait(full: Full, was_failed: bool) -> bool:
    """Room comes as answers end, a lost group's next life within seconds; a full queue is for other servers.

    A request that we failed waits for its queue, too.
    """
    return full.code not in (TOO_LONG, DEADLINE) and (full.code in (ROOM, NO_GROUP) or was_failed)


def failure(full: Full) -> Failure:
    """The refusal as an API error: 400 never fits, 503 nobody could serve it in time, 429 overload."""
    if full.code == TOO_LONG:
        return Failure(400, TOO_LONG, full.reason, "max_tokens")
    status = 503 if full.code in (NO_GROUP, DEADLINE) else 429
    return Failure(status, full.code, full.reason, None, max(full.retry_after_us, RETRY_AFTER_LEAST_US))


def rejection(rejected: Rejected, group_name: str, was_full: bool) -> Failure | None:
    """An engine's rejection as an API error; None for a full queue, once: the balancer's news of it may be old."""
    if not rejected.is_full:
        return Failure(400, "request_rejected", rejected.reason)
    if not was_full:
        return None
    return failure(Full(QUEUE, f"{group_name}: {rejected.reason}", RETRY_AFTER_LEAST_US))
