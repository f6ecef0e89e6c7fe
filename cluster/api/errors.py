"""Errors of the HTTP side: what a service may raise, what a client did wrong, and the object a client gets.

ApiError                      has status, type, code and param
├── BadRequestError           400, the client's request breaks a rule
├── UnauthorisedError         401, no valid API key
├── NotFoundError             404, unknown model
├── TooLargeError             413, body over the byte limit
├── SlowBodyError             408, the body did not arrive in time
└── ServiceError              what a ChatService raises
    ├── BusyError             not now; retry after
    │   ├── FullError         429, every queue is full
    │   └── UnavailableError  503, no group can serve now
    ├── PromptTooLongError    400, prompt over the context
    ├── DeadlineExceededError 504, the request's deadline cannot be or was not met
    └── EngineError           500, the computation failed
"""

import math


class ApiError(Exception):
    """An error with everything a client's error object needs; the message names field, value, rule and remedy."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to this error."""
        return {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object clients of the OpenAI and DeepSeek APIs expect."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code or self.type}
        return {"error": error}


class BadRequestError(ApiError):
    """The request breaks a rule; `param` is the path of the offending field."""

    status = 400
    type = "invalid_request_error"


class UnauthorisedError(ApiError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(ApiError):
    """The named model is not served here."""

    status = 404
    type = "invalid_request_error"


class TooLargeError(ApiError):
    """The body is over the byte limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class SlowBodyError(ApiError):
    """The body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ServiceError(ApiError):
    """What a `ChatService` raises from its iterator."""


class BusyError(ServiceError):
    """Not now: `retry_after_s` is when to try again, 0 if nobody knows."""

    def __init__(self, retry_after_s: float, message: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least 1, if it is known."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))} if self.retry_after_s > 0 else {}


class FullError(BusyError):
    """Every queue that could take the request is full; `retry_after_s` is when to try again."""

    status = 429
    type = "rate_limit_error"
    code = "server_overloaded"

    def __init__(self, retry_after_s: float, message: str = "every queue is full; retry later") -> None:
        super().__init__(max(1.0, retry_after_s), message)


class PromptTooLongError(ServiceError):
    """The prompt, or prompt plus output, does not fit the context."""

    status = 400
    type = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message, param=param)


class UnavailableError(BusyError):
    """Nothing can serve the request now, and it is not a matter of load."""

    status = 503
    type = "server_error"
    code = "service_unavailable"

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(retry_after_s, message)


class DeadlineExceededError(ServiceError):
    """The request's deadline passed, or cannot be met."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class EngineError(ServiceError):
    """The computation failed and could not be repeated elsewhere; the message may be shown to the client."""

    status = 500
    type = "server_error"
    code = "engine_error"
