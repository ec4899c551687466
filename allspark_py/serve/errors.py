"""ApiError: what a client is told of a failure, in the shapes of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

from allspark._allspark import AsStatus
from allspark.error_text import shown

# HTTP status -> the `type` that OpenAI's and Anthropic's clients know. Other errors of a request
# are "invalid_request_error".
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# What a start's status means to a client.
_STATUSES = {
    AsStatus.ALLSPARK_PARAM_ERROR: (400, "invalid_request"),
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: (400, "context_length_exceeded"),
    AsStatus.ALLSPARK_LORA_NOT_FOUND: (404, "model_not_found"),
    AsStatus.ALLSPARK_REQUEST_DENIED: (429, "engine_overloaded"),
    AsStatus.ALLSPARK_MEMORY_ERROR: (503, "out_of_memory"),
    AsStatus.ALLSPARK_CACHE_MEMORY_OUT: (503, "out_of_memory"),
}
RETRY_AFTER_S = 1
# Of a message. What this server does not write itself may quote a whole schema or expression.
MAX_CHARS = 4000


class ApiError(Exception):
    """A failure with its HTTP status.

    Args:
        param: the field of the request that is wrong, as "messages[2].content".
        code: what went wrong, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ):
        message = _bounded(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param and _bounded(param)
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def to_openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def to_anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body that Anthropic's clients read."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        error = {"type": kind, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}


def _bounded(text: str) -> str:
    """Begin and end of a long text: a fault is named first, or last."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2 - 2
    return f"{text[:half]}...{text[-half:]}"


def invalid_value(message: str, param: str | None = None) -> ApiError:
    """The error for a field that is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def refused(status: AsStatus, message: str) -> ApiError:
    """The error for a request that the engine did not start."""
    http_status, code = _STATUSES.get(status, (500, "internal_error"))
    return ApiError(http_status, message, code=code)


def model_not_found(name: str, known: list[str]) -> ApiError:
    """The error for a model that is not served."""
    listed = ", ".join(known)
    message = f"The model {shown(name)} does not exist; the models here are {listed}"
    return ApiError(404, message, param="model", code="model_not_found")
