"""What the routes share: the engine, the tokenizer, the limits, and how a prompt becomes jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request

from mesh_transformer.completion import Options
from mesh_transformer.config import ModelConfig
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.serving.api_errors import invalid
from mesh_transformer.serving.engine import Engine, State
from mesh_transformer.serving.job import Event, Job
from mesh_transformer.serving.limits import Limits
from mesh_transformer.serving.metrics import Metrics

MOST_BYTES_A_TOKEN = 64  # a prompt longer than this many characters for each token allowed is not even encoded


@dataclasses.dataclass
class Prompt:
    """Token ids as the model reads them (the last `seq` of `given`), and the text that an echo shows."""

    ids: list[int]
    given: int
    text: str

    @property
    def warning(self) -> str | None:
        """What is to be said of a prompt that did not fit."""
        return f"only the last {len(self.ids)} of the prompt's {self.given} tokens were read" if self.cut else None

    @property
    def cut(self) -> bool:
        return self.given > len(self.ids)


@dataclasses.dataclass
class Service:
    """One model being served under the name `name`; `created`: Unix time."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    limits: Limits
    metrics: Metrics
    name: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def read(self, prompt: str | Sequence[int], param: str) -> Prompt:
        """A prompt's tokens. Raises RequestError naming `param` where it is too long or has ids that do not exist."""
        if isinstance(prompt, str):
            # Encoded beside the loop, which goes on with other requests meanwhile.
            if len(prompt) > self.limits.max_prompt * MOST_BYTES_A_TOKEN:
                raise self._too_long(param, f"{len(prompt)} characters")
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            ids = list(prompt)
            outside = next((i for i in ids if i >= self.tokenizer.vocab_size), None)
            if outside is not None:
                message = f"the token id {outside} does not exist; expected 0 to {self.tokenizer.vocab_size - 1}"
                raise invalid(param, message)
        if len(ids) > self.limits.max_prompt:
            raise self._too_long(param, f"{len(ids)} tokens")
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
        kept = (ids or [self.tokenizer.eot_id])[-self.model.seq :]
        return Prompt(kept, max(len(ids), 1), text)

    def _too_long(self, param: str, found: str) -> Exception:
        return invalid(param, f"the prompt has {found}, this server takes at most {self.limits.max_prompt} tokens")

    def check_max_tokens(self, asked: int) -> int:
        """Raises RequestError where more tokens are asked for than the server gives."""
        if asked > self.limits.max_tokens:
            raise invalid("max_tokens", f"{asked} is above this server's limit of {self.limits.max_tokens}")
        return asked

    def jobs(
        self, request: Request, prompts: Sequence[Prompt], n: int, options: Options, echo: bool = False
    ) -> Callable[[Callable[[Event], None]], list[Job]]:
        """What makes the jobs of n completions of each prompt; the i-th of all draws by the options' seed + i.

        echo: the first part of each has log-probabilities of the prompt."""
        client = request.scope["mesh_transformer.client"]
        each = [prompt.ids for prompt in prompts for _ in range(n)]

        def make(deliver: Callable[[Event], None]) -> list[Job]:
            return [
                Job(ids, dataclasses.replace(options, seed=options.seed + i), client, i, deliver, echo)
                for i, ids in enumerate(each)
            ]

        return make

    @property
    def status(self) -> str:
        """In the words of `schemas.Health`."""
        state = self.engine.state
        if state is State.STOPPED:
            return State.DRAINING.value
        return "stalled" if state is State.READY and self.engine.stalled else state.value


def seed_of(asked: int | None) -> int:
    """The seed asked for, or one that nobody can foresee."""
    return secrets.randbelow(2**63) if asked is None else asked


def warnings(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Headers that say what was done to prompts."""
    found = [f'299 - "{prompt.warning}"' for prompt in prompts if prompt.cut]
    return {"Warning": ", ".join(found[:4])} if found else {}
