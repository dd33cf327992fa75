"""One text on its way through the server: what was asked, who waits for it, and what comes back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from mesh_transformer.answer import Completion
from mesh_transformer.completion import Options
from mesh_transformer.sampling import LogProbs
from mesh_transformer.serving.api_errors import RequestError


@dataclasses.dataclass(frozen=True)
class Part:
    """The next part of the text that a request counts as its `index`-th; with the first, where the job echoes,
    log-probabilities of the prompt's tokens but the first."""

    index: int
    completion: Completion
    prompt: LogProbs | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Instead of what would have followed."""

    index: int
    error: RequestError


Event = Part | Failure


@dataclasses.dataclass(eq=False)
class Job:
    """A text to be completed: `prompt` ids, fitted to the context; `client`, whose turn it takes in the queue;
    `echo`, whether log-probabilities of the prompt are wanted.

    `deliver` gets every event, from the engine's thread, and must return at once. Its last event is a Failure or a Part
    with a finish reason; after `cancel` there may be none.
    """

    prompt: list[int]
    options: Options
    client: str
    index: int
    deliver: Callable[[Event], None]
    echo: bool = False
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    cancelled: bool = False
