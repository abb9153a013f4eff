"""Errors that only HTTP knows, and the OpenAI shape of every error.

RequestError (kvferry.protocol.errors)
├── InvalidRequest            400
│   ├── UnknownParameter      400  a field that does not exist
│   ├── UnsupportedParameter  400  a field that exists elsewhere but has no effect here
│   └── ContextTooLong        400  names the prompt, max_tokens and the limit
├── BodyTooLarge              413
├── WrongContentType          415
└── NotFound                  404
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec

from kvferry.protocol.errors import (
    InvalidRequest,
    KVFerryError,
    Overloaded,
    PeerError,
    RequestError,
    Unavailable,
)

#: An instance that is restarted registers again after about this long, so asking sooner is of no use.
UNAVAILABLE_RETRY_S = 5.0


class UnknownParameter(InvalidRequest):
    code = "unknown_parameter"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413


class WrongContentType(RequestError):
    code = "wrong_content_type"
    http_status = 415


class NotFound(RequestError):
    code = "not_found"
    http_status = 404


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success: {"error": {message, type, param, code}}."""

    error: ErrorDetail


def error_body(error: KVFerryError) -> ErrorBody:
    """The body for an error of ours. One that is neither the client's nor a peer's fault shows no text of its own:
    that is for the log."""
    if isinstance(error, RequestError):
        return ErrorBody(ErrorDetail(str(error), "invalid_request_error", error.param, error.code))
    if isinstance(error, PeerError):
        return ErrorBody(ErrorDetail(str(error), "server_error", None, error.code))
    return ErrorBody(ErrorDetail("the server failed; its log has the details", "server_error", None, error.code))


def status_body(status: int, detail: str) -> ErrorBody:
    """The body for an HTTP status that the framework decided on (unknown route, method not allowed)."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorBody(ErrorDetail(detail, kind, None, code))


def retry_after_header(error: KVFerryError) -> dict[str, str]:
    """Whole seconds, rounded up; empty where waiting would change nothing."""
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, Unavailable):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s or UNAVAILABLE_RETRY_S)))}
    return {}
