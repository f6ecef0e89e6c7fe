"""Where a request stands in its life."""

from enum import StrEnum


class State(StrEnum):
    """Where a request stands; each waits for something that ends, at the latest by time."""

    NEW = "new"
    MATCHING = "matching"
    ENCODING = "encoding"
    ROUTING = "routing"
    RESERVING = "reserving"
    WAITING = "waiting for room"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing off"
    DECODING = "decoding"
    ENDED = "ended"


AT_ENGINE = (State.PREFILLING, State.HANDING_OFF, State.DECODING)
