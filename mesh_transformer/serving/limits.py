"""What one request may ask of a server, and how many may ask at once."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """`max_batch`, texts that run at once; `max_queue`, texts that may wait beside them.

    Of one request: `max_body` bytes, `max_prompt` tokens of a prompt (of which the model reads the last `seq`),
    `max_tokens` new ones, `max_n` completions of a prompt, `max_prompts` prompts, `timeout` seconds from its last byte
    to its answer's last.

    `chunk`: tokens of a prompt that are read at once, the longest that others wait for a newcomer; `body_timeout`:
    seconds in which a body must have arrived; `drain`: seconds that running requests have to end after SIGTERM.
    """

    max_batch: int = 8
    max_queue: int = 100
    chunk: int = 64
    max_body: int = 1 << 20
    max_prompt: int = 8192
    max_tokens: int = 2048
    max_n: int = 8
    max_prompts: int = 16
    timeout: float = 600.0
    body_timeout: float = 30.0
    drain: float = 60.0

    @property
    def capacity(self) -> int:
        """Texts in the server at once, running and waiting."""
        return self.max_batch + self.max_queue
