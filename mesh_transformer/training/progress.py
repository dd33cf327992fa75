"""How far a run is: a bar with ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
LINE_SECONDS = 10.0
RECENT = 0.1  # weight of the newest step in the average that the ETA rests on


class Progress:
    """Shows steps, loss, speed and time left. `stream` (default stderr) decides: a terminal gets a tqdm bar.

    Elsewhere lines go to the log: the first step, then one at most every `line_seconds`, validations, and the last.
    """

    def __init__(
        self,
        step: int,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        line_seconds: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first, self._total = step, total_steps
        self._stream = stream if stream is not None else sys.stderr
        self._line_seconds = line_seconds
        self._clock = clock
        self._seconds: float | None = None
        self._last_line: float | None = None
        self._bar: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            # Log lines go above the bar instead of through it.
            loggers = [found for found in (logging.getLogger(), logging.getLogger(_PACKAGE)) if found.handlers]
            self._stack.enter_context(logging_redirect_tqdm(loggers))
            self._bar = tqdm(
                total=self._total, initial=self._first, file=self._stream, unit="step", dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {postfix}",
            )  # fmt: skip
            self._stack.callback(self._bar.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def update(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Shows step `step`, which took `seconds`."""
        if step > self._first + 1:  # the first step of a process compiles; the ETA must not believe it
            recent = self._seconds if self._seconds is not None else seconds
            self._seconds = (1.0 - RECENT) * recent + RECENT * seconds
        text = self._describe(step, metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        now = self._clock()
        validated = any(name.startswith("val/") for name in metrics)
        waited = self._last_line is None or now - self._last_line >= self._line_seconds
        if (self._bar is None and (waited or step == self._total)) or validated:
            self._last_line = now
            logger.info("step %d/%d  %s", step, self._total, text)

    def _describe(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"loss {metrics['train/loss']:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("val/loss_")]
        parts.append(f"lr {metrics['train/learning_rate']:.2e}")
        parts.append(f"{metrics['train/tokens_per_sec']:,.0f} tokens/s")
        if self._seconds is not None and step < self._total:
            parts.append(f"ETA {duration((self._total - step) * self._seconds)}")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """`seconds` as 1:02:03, with days in front where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"
