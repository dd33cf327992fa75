"""One HTTP request's part in the engine: its texts, submitted together and given up together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive

from mesh_transformer.serving.api_errors import timed_out
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.job import Event, Failure, Job, Part


class ClientGone(Exception):  # noqa: N818  not an error: nobody is there any more to tell
    """The client has closed its connection."""


class Exchange:
    """Submits jobs on entering; on leaving, however that comes about, whatever still runs of them is cancelled.

    Raises, while parts are awaited: ClientGone as soon as the client disconnects, RequestError for what the engine says
    and after `timeout` seconds. A client that reads slowly holds up nobody: parts wait here, as many as its limit of
    tokens lets come, while its row of the batch goes on and ends.
    """

    def __init__(self, engine: Engine, receive: Receive, timeout: float) -> None:
        self.engine, self._receive = engine, receive
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs: Sequence[Job] = ()
        self._watcher: asyncio.Task[None] | None = None

    def deliver(self, event: Event) -> None:
        """Takes an event from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has closed: the server has ended, and with it everyone who could want this
            return

    def submit(self, make: Callable[[Callable[[Event], None]], Sequence[Job]]) -> None:
        """`make` builds the jobs around what they deliver to. Raises RequestError where they are not taken."""
        jobs = make(self.deliver)
        self.engine.submit(jobs)
        self._jobs = jobs

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self.engine.cancel(self._jobs)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 at least."""
        return max(0.0, self._deadline - time.monotonic())

    async def parts(self) -> AsyncIterator[Part]:
        """All parts of all texts, as they come."""
        open_texts = len(self._jobs)
        while open_texts:
            try:
                async with asyncio.timeout(self.remaining):
                    event = await self._events.get()
            except TimeoutError as error:
                raise timed_out(self._timeout) from error
            if event is None:
                raise ClientGone
            if isinstance(event, Failure):
                raise event.error
            open_texts -= event.completion.finish_reason is not None
            yield event

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)
