"""The page at `/`: one file, which asks the same API as everybody else and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The page, and headers that let it run its own script and nothing else."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }  # fmt: skip


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def router() -> APIRouter:
    """The route of the page, which is no part of the API and so not in its schema."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        text, headers = page()
        return HTMLResponse(text, headers=headers)

    return routes
