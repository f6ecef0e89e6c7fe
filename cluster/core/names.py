"""Names of a request's attempts at engines, encoders, balancers and in tickets."""

FIRST_ATTEMPT = 1  # the number of the attempt that an engine may begin by itself, from another answer's prompt


def engine_id(request_id: str, attempt: int) -> str:
    """Name of one attempt's sequence in engines, tickets and balancer reservations."""
    return f"{request_id}/{attempt}"


def split_engine_id(name: str) -> tuple[str, int]:
    """(request id, attempt) of an engine's sequence name; a ValueError for a foreign name."""
    request_id, _, attempt = name.rpartition("/")
    if not request_id or not attempt.isdecimal():
        raise ValueError(f"sequence name {name!r} must be <request id>/<attempt>; use engine_id()")
    return request_id, int(attempt)


def image_id(request_id: str, attempt: int, image_index: int, trial: int) -> str:
    """Name of one try to encode one image, at encoders and at the encode balancer."""
    return f"{request_id}/{attempt}/image-{image_index}.{trial}"
