"""Errors as clients see them: always JSON, in the form of the OpenAI API, and never more than they need to know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from mesh_transformer.errors import MeshTransformerError


class RequestError(MeshTransformerError):
    """A request that is not answered as asked: HTTP `status`, and what the error object says.

    `param` names the field at fault. `retry_after` in seconds, where trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The reply's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def invalid(param: str | None, message: str, code: str | None = None) -> RequestError:
    """400: the request's own fault, `param` says where."""
    return RequestError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def queue_full(waiting: int, retry_after: float) -> RequestError:
    return RequestError(
        429, f"the queue is full ({waiting} texts): try again later", "rate_limit_error", code="queue_full",
        retry_after=retry_after,
    )  # fmt: skip


def unavailable(what: str, retry_after: float = 5) -> RequestError:
    """503: loading, draining or broken."""
    return RequestError(503, what, "server_error", code="unavailable", retry_after=retry_after)


def failed() -> RequestError:
    """500: what went wrong is in the server's log, not in the reply."""
    return RequestError(500, "the server failed while it worked on this request", "server_error", code="failed")


def timed_out(seconds: float) -> RequestError:
    return RequestError(
        504, f"the answer was not ready within {seconds:g} seconds, and was given up", "server_error", code="timeout"
    )


class ErrorObject(BaseModel):
    """What went wrong: `param` names the field of the request that is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every reply that is not an answer."""

    error: ErrorObject = Field(description="what went wrong")


class Json(Response):
    """A JSON reply that no content can break: half surrogate pairs become U+FFFD's stand-in, a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Compact JSON in UTF-8. Raises ValueError for NaN and infinities, which are no JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def reply(error: RequestError, headers: Mapping[str, str] | None = None) -> Json:
    return Json(error.body, error.status, {**(headers or {}), **error.headers})
