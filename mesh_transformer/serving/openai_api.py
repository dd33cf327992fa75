"""`/v1/completions` and `/v1/models`, as the OpenAI API has them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.answer import Answer, Completion, Token
from mesh_transformer.completion import Options
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.sampling import LogProbs
from mesh_transformer.serving.api_errors import Json, RequestError, invalid
from mesh_transformer.serving.event_stream import EventStream
from mesh_transformer.serving.exchange import Exchange
from mesh_transformer.serving.job import Part
from mesh_transformer.serving.schemas import CompletionAnswer, CompletionRequest, Model, ModelList
from mesh_transformer.serving.service import Prompt, Service, seed_of, warnings

MAX_TOKENS = 16  # the OpenAI API's, where max_tokens is null


def router(service: Service) -> APIRouter:
    """The routes, answered by `service`."""
    routes = APIRouter(prefix="/v1")
    model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "mesh-transformer"}

    @routes.get("/models", response_model=ModelList, summary="The one model that is served")
    async def models() -> Response:
        return Json({"object": "list", "data": [model]})

    @routes.get("/models/{model_id:path}", response_model=Model, summary="What is told of a model")
    async def one_model(model_id: str) -> Response:
        _check_model(service, model_id)
        return Json(model)

    @routes.post(
        "/completions", response_model=CompletionAnswer, summary="Complete texts",
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        if asked.model is not None:
            _check_model(service, asked.model)
        options = _options(service, asked)
        prompts = [await service.read(prompt, "prompt") for prompt in _prompts(service, asked)]
        answer = _Answer(service, asked, prompts)
        make = service.jobs(request, prompts, answer.n, options, bool(asked.echo) and asked.logprobs is not None)
        exchange = Exchange(service.engine, request.receive, service.limits.timeout)
        if asked.stream:
            return EventStream(exchange, make, answer.chunks(exchange), warnings(prompts))
        async with exchange:
            exchange.submit(make)
            async for part in exchange.parts():
                await answer.add(part)
        return Json(answer.whole(), headers=warnings(prompts))

    return routes


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        message = f"the model {name!r} does not exist; this server has {service.name!r}"
        raise RequestError(404, message, param="model", code="model_not_found")


def _prompts(service: Service, asked: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one by one. Raises RequestError where there are too many, or too many completions of them."""
    prompt, limits = asked.prompt, service.limits
    if prompt is None or isinstance(prompt, str):
        found: list[Any] = [prompt or ""]
    else:
        found = [prompt] if isinstance(prompt[0], int) else list(prompt)
    if len(found) > limits.max_prompts:
        raise invalid("prompt", f"{len(found)} prompts, this server takes at most {limits.max_prompts} at once")
    n = asked.n or 1
    if n > limits.max_n:
        raise invalid("n", f"{n} is above this server's limit of {limits.max_n}")
    if n * len(found) > limits.capacity:
        raise invalid("n", f"{n} completions of {len(found)} prompts are more than this server holds")
    if asked.best_of not in (None, n):
        raise invalid("best_of", f"is supported only where it equals n ({n})")
    return found


def _options(service: Service, asked: CompletionRequest) -> Options:
    """The request's options. Raises RequestError for what is beyond this server's limits or vocabulary."""
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "is allowed only where stream is true")
    sampler = {
        "temp": _or(asked.temperature, 1.0), "top_p": _or(asked.top_p, 1.0), "top_k": asked.top_k,
        "min_p": asked.min_p, "repetition_penalty": asked.repetition_penalty, "logprobs": asked.logprobs,
        "presence_penalty": asked.presence_penalty, "frequency_penalty": asked.frequency_penalty,
        "logit_bias": _bias(service, asked.logit_bias),
    }  # fmt: skip
    limit = service.check_max_tokens(_or(asked.max_tokens, min(MAX_TOKENS, service.limits.max_tokens)))
    return Options(limit, sampler, seed_of(asked.seed), stop=tuple(asked.stop or ()))


def _or(value: Any, default: Any) -> Any:
    """A field that is null means its default."""
    return default if value is None else value


def _bias(service: Service, asked: dict[str, float] | None) -> dict[int, float] | None:
    size = service.tokenizer.vocab_size
    found = {int(key): value for key, value in (asked or {}).items()}
    outside = next((key for key in found if key >= size), None)
    if outside is not None:
        raise invalid("logit_bias", f"the token id {outside} does not exist; expected 0 to {size - 1}")
    return found or None


class _Answer:
    """The choices of one request as they grow, and the JSON of its chunks and its whole."""

    def __init__(self, service: Service, asked: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.asked, self.prompts, self.n = asked, prompts, asked.n or 1
        self._tokenizer = service.tokenizer
        self.texts = [_Choice(i, prompts[i // self.n], bool(asked.echo)) for i in range(self.n * len(prompts))]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
            "model": service.name,
        }  # fmt: skip

    async def add(self, part: Part) -> dict[str, Any]:
        """Notes a part; returns the choice that tells only it."""
        choice = self.texts[part.index]
        before: Sequence[Token] = ()
        if part.prompt is not None:  # of which there may be thousands: other requests go on meanwhile
            before = await asyncio.to_thread(_prompt_tokens, choice.prompt, part.prompt, self._tokenizer)
        return choice.add(part.completion, self.asked.logprobs, self._tokenizer.spell, before)

    @property
    def usage(self) -> dict[str, int]:
        prompt = sum(len(each.ids) for each in self.prompts)
        new = sum(choice.tokens for choice in self.texts)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self) -> dict[str, Any]:
        return self._head | {"choices": [choice.whole() for choice in self.texts], "usage": self.usage}

    async def chunks(self, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
        """One chunk for each part, and the usage at the end where it is asked for."""
        wants_usage = self.asked.stream_options is not None and bool(self.asked.stream_options.include_usage)
        extra: dict[str, Any] = {"usage": None} if wants_usage else {}
        async for part in exchange.parts():
            yield self._head | {"choices": [await self.add(part)]} | extra
        if wants_usage:
            yield self._head | {"choices": [], "usage": self.usage}


@dataclasses.dataclass
class _Choice:
    """One text of the answer."""

    index: int
    prompt: Prompt
    echo: bool
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] | None = None

    def add(
        self, part: Completion, listed: int | None, spell: Callable[[int], str], before: Sequence[Token] = ()
    ) -> dict[str, Any]:
        """Notes a part; returns the choice that tells only it, with `listed` alternatives of each token.

        before: the prompt's tokens, where they are told too.
        """
        lead = self.prompt.text if self.echo and not self.tokens and not self.text else ""
        self.text += lead + part.text
        self.tokens += part.tokens
        self.finish_reason = part.finish_reason
        new = None
        if listed is not None:
            shift = len(self.prompt.text) if self.echo else 0
            own = [dataclasses.replace(token, offset=token.offset + shift) for token in part.logprobs]
            new = _logprobs([*before, *own], listed, spell)
            if self.logprobs is None:
                self.logprobs = {key: [] for key in new}
            for key, values in new.items():
                self.logprobs[key] += values
        return self._json(lead + part.text, new)

    def whole(self) -> dict[str, Any]:
        return self._json(self.text, self.logprobs)

    def _json(self, text: str, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": self.finish_reason}


def _logprobs(tokens: Sequence[Token], listed: int, spell: Callable[[int], str]) -> dict[str, list[Any]]:
    """The lists of `schemas.Logprobs`; the drawn token is among its alternatives, as the OpenAI API has it."""

    def alternatives(token: Token) -> dict[str, float | None] | None:
        if not listed or math.isnan(token.logprob):
            return None
        rest = {spell(i): _finite(x) for i, _, x in reversed(token.top[:listed])}
        return {spell(token.id): _finite(token.logprob)} | rest

    return {
        "tokens": [spell(token.id) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [alternatives(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _prompt_tokens(prompt: Prompt, listed: LogProbs, tokenizer: Tokenizer) -> tuple[Token, ...]:
    """The tokens of a prompt as it was read, with offsets in its text; nothing comes before the first, whose
    log-probability is NaN. An empty text has none: the end-of-text that the model reads for it was not given."""
    if not prompt.text:
        return ()
    first = LogProbs(np.full(1, np.nan), np.zeros((1, 0), np.int32), np.zeros((1, 0)))
    head = Answer(tokenizer)
    tokens = head.add(prompt.ids[:1], None, first)
    rest = head.add(prompt.ids[1:], "length", listed)
    read = (tokens + rest).logprobs
    start = len(prompt.text) - len(tokenizer.decode(prompt.ids)) if prompt.cut else 0
    return tuple(dataclasses.replace(token, offset=max(token.offset + start, 0)) for token in read)


def _finite(logprob: float) -> float | None:
    """JSON has no infinity; the OpenAI API says -9999 for it, and null for what has no probability (NaN)."""
    return None if math.isnan(logprob) else max(float(logprob), -9999.0)
