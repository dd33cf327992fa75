"""`POST /complete`, as the 2021 library's server had it; its errors are this server's."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.completion import Options
from mesh_transformer.serving.api_errors import Json
from mesh_transformer.serving.exchange import Exchange
from mesh_transformer.serving.schemas import CompleteAnswer, CompleteRequest
from mesh_transformer.serving.service import Service, seed_of, warnings

MAX_TOKENS = 256  # the 2021 library's


def router(service: Service) -> APIRouter:
    """The route, answered by `service`."""
    routes = APIRouter()

    @routes.post("/complete", response_model=CompleteAnswer, summary="Go on with a text")
    async def complete(asked: CompleteRequest, request: Request) -> Response:
        limit = MAX_TOKENS if asked.max_tokens is None else service.check_max_tokens(asked.max_tokens)
        options = Options(
            min(limit, service.limits.max_tokens),
            {"top_p": asked.top_p, "temp": asked.temp, "top_k": asked.top_k},
            seed_of(asked.seed),
            stop=tuple(asked.stop or ()),
        )
        async with Exchange(service.engine, request.receive, service.limits.timeout) as exchange:
            prompt = await service.read(asked.context, "context")
            exchange.submit(service.jobs(request, [prompt], 1, options))
            text = "".join([part.completion.text async for part in exchange.parts()])
        return Json({"completion": text}, headers=warnings([prompt]))

    return routes
