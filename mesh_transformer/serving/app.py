"""The HTTP application: routes, errors, and the layers around them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from mesh_transformer.serving import complete_api, openai_api, page
from mesh_transformer.serving.api_errors import ErrorBody, Json, RequestError, failed, invalid, reply
from mesh_transformer.serving.exchange import ClientGone
from mesh_transformer.serving.middleware import BodyLimit, Cors, Guard, Keys
from mesh_transformer.serving.schemas import Health
from mesh_transformer.serving.service import Service

_REFUSALS = {
    400: "what was asked for cannot be; `param` names the field", 401: "the API key is missing or wrong",
    404: "there is no such thing", 408: "the body came too slowly", 413: "the body is too large",
    429: "the queue is full", 500: "the server failed", 503: "loading, draining or broken", 504: "not ready in time",
}  # fmt: skip
CLIENT_GONE = 499  # nobody reads it; proxies' logs know the number
_MOST_REASONS = 3  # of a field's that an error tells


def create_app(service: Service, origins: Sequence[str], keys: Sequence[str]) -> ASGIApp:
    """The whole application. `origins`: pages that may ask from a browser; `keys`: API keys, none means open."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": description} for status, description in _REFUSALS.items()
    }
    api = FastAPI(
        title="mesh-transformer", version="1", docs_url=None, redoc_url=None, responses=refusals,
        redirect_slashes=False,
    )  # fmt: skip
    api.include_router(complete_api.router(service))
    api.include_router(openai_api.router(service))
    api.include_router(page.router())
    _add_operations(api, service)
    _add_error_handlers(api)
    schema = _schema(api, protected=bool(keys))
    api.openapi = lambda: schema  # type: ignore[method-assign]
    guarded = Guard(Keys(BodyLimit(api, service.limits.max_body, service.limits.body_timeout), keys), service.metrics)
    return Cors(guarded, origins)


def _add_operations(api: FastAPI, service: Service) -> None:
    @api.get("/health", response_model=Health, summary="Whether requests are taken", responses={503: {"model": Health}})
    async def health() -> Response:
        status = service.status
        found = Health(
            status=status, model=service.name, running=service.engine.running, waiting=service.engine.waiting  # type: ignore[arg-type]
        )  # fmt: skip
        return Json(found.model_dump(), 200 if status == "ready" else 503)

    @api.get(
        "/metrics", summary="Counters for Prometheus", response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": service.metrics.content_type})


def _add_error_handlers(api: FastAPI) -> None:
    """Everything that a route raises, as JSON of one form."""

    async def refused(request: Request, error: Exception) -> Response:
        return reply(error if isinstance(error, RequestError) else failed())

    async def not_valid(request: Request, error: Exception) -> Response:
        return reply(_explain(error.errors() if isinstance(error, RequestValidationError) else []))

    async def no_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = getattr(error, "headers", None)
        if status == 400:  # the framework's word for a body that it could not parse
            return reply(invalid(None, "the body could not be read as JSON"))
        message = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(status)
        return reply(RequestError(status, message or "this request was refused"), headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    api.add_exception_handler(RequestError, refused)
    api.add_exception_handler(RequestValidationError, not_valid)
    api.add_exception_handler(HTTPException, no_route)
    api.add_exception_handler(ClientGone, gone)
    api.add_exception_handler(Exception, refused)


def _explain(problems: Sequence[Any]) -> RequestError:
    """One error for a body that does not fit, about the first field at fault."""
    if not problems:
        return invalid(None, "the request is not valid")
    first = problems[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not JSON: {first.get('ctx', {}).get('error', '')} (at {first['loc'][-1]})")
    if not where:
        return invalid(None, "the body must be a JSON object, sent as application/json")
    mine = [problem for problem in problems if str(problem["loc"][-1 if len(problem["loc"]) == 1 else 1]) == where[0]]
    reasons = list(dict.fromkeys(_reason(problem) for problem in mine))
    return invalid(where[0], "; ".join(reasons[:_MOST_REASONS]))


def _reason(problem: Any) -> str:
    return {
        "missing": "this field is required", "extra_forbidden": "this field is unknown",
    }.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")  # fmt: skip


def _schema(api: FastAPI, protected: bool) -> dict[str, Any]:
    """The OpenAPI description, without the framework's own form of validation errors, which is never sent."""
    schema = copy.deepcopy(api.openapi())
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if protected and path.startswith(("/complete", "/v1/")):
                operation["security"] = [{"key": []}]
    parts = schema["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    if protected:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema
