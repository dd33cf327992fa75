"""What every request passes before a route sees it, as plain ASGI so that nothing can reply around it.

Outermost first: `Cors` (headers on every reply, whatever it is), `Guard` (the last resort: a 500 without details),
`BodyLimit` (size and time), `Keys`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.serving.api_errors import RequestError, failed, reply
from mesh_transformer.serving.metrics import Metrics

logger = logging.getLogger(__name__)

_ALLOWED_METHODS = "GET, POST, OPTIONS"
_ALLOWED_HEADERS = "Authorization, Content-Type"
_EXPOSED_HEADERS = "Retry-After, Warning"
PROTECTED = ("/complete", "/v1/")


class Cors:
    """The configured origins on every reply: 200, 4xx, 429 and 500 alike; preflights are answered here.

    A reply names the asking origin if it is one of `origins`, else the first of them (which a browser on another page
    refuses, as it should). `*` allows every page.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self.app, self.origins = app, tuple(origins)

    def _headers(self, origin: str | None) -> dict[str, str]:
        if not self.origins:
            return {}
        chosen = "*" if "*" in self.origins else origin if origin in self.origins else self.origins[0]
        headers = {"Access-Control-Allow-Origin": str(chosen), "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
        return headers if chosen == "*" else {**headers, "Vary": "Origin"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        ours = self._headers(asked.get("origin"))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ours.items():
                    headers[name] = value
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in asked:
            start: Message = {"type": "http.response.start", "status": 204, "headers": []}
            headers = MutableHeaders(scope=start)
            if ours:
                headers["Access-Control-Allow-Methods"] = _ALLOWED_METHODS
                headers["Access-Control-Allow-Headers"] = _ALLOWED_HEADERS
                headers["Access-Control-Max-Age"] = "600"
            await with_headers(start)
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, with_headers)


class Guard:
    """Turns what a route raises into a reply, a RequestError as it says and anything else into a bare 500; counts."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except RequestError as error:
            if not status:
                await reply(error)(scope, receive, noting)
        except Exception:  # a bug of ours: the log has it all, the client nothing of it
            logger.exception("a request failed")
            if not status:
                await reply(failed())(scope, receive, noting)
        finally:
            # By the route's template, so that what clients ask for cannot make up new series.
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status or "gone")).inc()


class BodyLimit:
    """Reads the whole body first: `most` bytes within `seconds`, else 413 or 408. What follows it, a disconnect, is
    still there to be received."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.most:
            raise self._too_large()
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
        except TimeoutError as error:
            message = f"the body had not arrived after {self.seconds:g} seconds"
            raise RequestError(408, message, code="body_timeout") from error
        if body is None:  # the client has gone
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body has more than {self.most} bytes", code="body_too_large")


class Keys:
    """Asks for one of `keys` as `Authorization: Bearer KEY` on the paths that do work; without keys it asks nothing.

    Hashes are compared, every one of them and in constant time, so that neither a key's length nor how much of it was
    right can be measured. The client's place in the queue goes by its key, or by its address.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = scope.get("client")
        scope["mesh_transformer.client"] = address[0] if address else "local"
        if self.hashes and scope["path"].startswith(PROTECTED):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            found = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
            matches = [hmac.compare_digest(found, each) for each in self.hashes]
            if kind.lower() != "bearer" or not any(matches):
                message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                error = RequestError(401, message, "authentication_error", code="invalid_api_key")
                await reply(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope["mesh_transformer.client"] = f"key {matches.index(True)}"
        await self.app(scope, receive, send)
