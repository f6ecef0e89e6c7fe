"""Names of roles and of actors: a member's actor is `<cluster>:<role>/<index>@<epoch>` in Ray's namespace."""

from shoal.balancers.reports import GroupRef

ENCODER = "encoder"
PROMPT = "prefill"
COMPLETION = "decode"
NORMAL = "normal"
INDEX = "index"
NODE = "node"
GATEWAY = "store-gateway"
ENCODE_BALANCER = "encode-balancer"
PREFILL_BALANCER = "prefill-balancer"
DECODE_BALANCER = "decode-balancer"

ENGINE_ROLES = (PROMPT, COMPLETION, NORMAL)


def role_of(group: GroupRef) -> str:
    """The role in a member's name."""
    return group.name.rpartition("/")[0]


def actor_name(cluster: str, group: GroupRef) -> str:
    """Ray name of one life of one member."""
    return f"{cluster}:{group.name}@{group.epoch}"


def controller_name(cluster: str) -> str:
    """Ray name of a cluster's controller, the one actor with a fixed name."""
    return f"{cluster}:controller"


def parse_actor_name(cluster: str, name: str) -> GroupRef | None:
    """The member behind a Ray actor name, None for actors that are not members of this cluster."""
    prefix, _, rest = name.partition(":")
    member, at, epoch = rest.rpartition("@")
    if prefix != cluster or not at or not epoch.isdecimal():
        return None
    return GroupRef(member, int(epoch))
