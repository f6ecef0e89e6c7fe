"""What an entrypoint gives an engine with a request, besides the request itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from shoal.cluster.core.handoff import Ticket
from shoal.engines.core.request import EngineRequest

Rows = npt.NDArray[np.uint16]  # bfloat16 bits, [tokens of the image's span, hidden]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request a sequence is, for letters back and for the store."""

    entrypoint: str
    request_id: str
    attempt: int
    traffic: str
    salt: str


@dataclass(frozen=True, slots=True)
class TicketOffer:
    """A ticket with what its holder needs to reach the target."""

    ticket: Ticket
    metadata: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageRef:
    """Where the embedding rows of one image can be read: a Ray object reference to `Rows`."""

    digest: bytes
    image_index: int
    rows: object


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """One sequence for a PROMPT engine (with an offer) or a NORMAL one (offer None)."""

    request: EngineRequest
    origin: Origin
    offer: TicketOffer | None
    images: tuple[ImageRef, ...] = ()
