"""Creates the actor of one member: which class serves a role, and what Ray must give it."""

from typing import Any

import ray
from shoal.balancers.reports import GroupRef
from shoal.cluster.live.balancer import BalancerActor
from shoal.cluster.live.names import (
    COMPLETION,
    DECODE_BALANCER,
    ENCODE_BALANCER,
    ENCODER,
    GATEWAY,
    INDEX,
    NODE,
    NORMAL,
    PREFILL_BALANCER,
    PROMPT,
    actor_name,
)
from shoal.cluster.live.session import NAMESPACE
from shoal.cluster.live.spec import ClusterSpec
from shoal.cluster.live.store import IndexActor, StoreNodeActor
from shoal.cluster.live.store_gateway import StoreGatewayActor

CALLS_MAX = 4096  # an async actor refuses nothing by itself; queues are bounded by the balancers


def create_member(spec: ClusterSpec, group: GroupRef, role: str) -> Any:
    """Start one life of a member; the handle. It is detached and never restarted by Ray: the controller does that.

    Engines are imported only here and in their own processes: a store node or balancer must not load torch.
    """
    options = {
        "name": actor_name(spec.name, group),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CALLS_MAX,
        "num_cpus": 0,
        "num_gpus": 1 if spec.cluster.device == "cuda" and role in (ENCODER, PROMPT, COMPLETION, NORMAL) else 0,
    }
    return ray.remote(_class_of(role)).options(**options).remote(spec, group)


def _class_of(role: str) -> type:
    if role == NODE:
        return StoreNodeActor
    if role == INDEX:
        return IndexActor
    if role == GATEWAY:
        return StoreGatewayActor
    if role in (PREFILL_BALANCER, DECODE_BALANCER, ENCODE_BALANCER):
        return BalancerActor
    if role == ENCODER:
        from shoal.cluster.live.encoder import EncoderActor

        return EncoderActor
    from shoal.cluster.live.engine import EngineActor

    return EngineActor
