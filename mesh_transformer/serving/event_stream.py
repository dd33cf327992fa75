"""Server-sent events: an answer that leaves as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mesh_transformer.serving.api_errors import RequestError, encode
from mesh_transformer.serving.exchange import ClientGone, Exchange
from mesh_transformer.serving.job import Event, Job

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """Sends `chunks` as `data:` events, and `[DONE]`.

    Nothing is sent before the first chunk is there, so that what fails until then is an error with its own status; what
    fails later is an `error` event, after which there is no `[DONE]`.
    """

    def __init__(
        self,
        exchange: Exchange,
        make: Callable[[Callable[[Event], None]], Sequence[Job]],
        chunks: AsyncIterator[dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, **_HEADERS})
        # An answer that is not whole yet has no length.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._exchange, self._make, self._chunks = exchange, make, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange as exchange:
            exchange.submit(self._make)
            started = False

            async def put(data: bytes, more: bool = True) -> None:
                nonlocal started
                # A client that never reads must not keep this open for ever.
                try:
                    async with asyncio.timeout(exchange.remaining):
                        if not started:
                            started = True
                            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await send({"type": "http.response.body", "body": data, "more_body": more})
                except TimeoutError as error:
                    raise ClientGone from error

            try:
                async for chunk in self._chunks:
                    await put(b"data: " + encode(chunk) + b"\n\n")
                await put(b"data: [DONE]\n\n", more=False)
            except RequestError as error:
                if not started:
                    raise
                await put(b"data: " + encode(error.body) + b"\n\n", more=False)
            except ClientGone:
                return
