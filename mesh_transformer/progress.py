"""How far a long piece of work is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

_PACKAGE = __name__.partition(".")[0]
BAR_SECONDS, LINE_SECONDS = 0.1, 10.0  # how often at most


class Progress:
    """Shows how much of `total` is done. Used in a `with` block; `stream` (default stderr) decides what it looks like.

    A terminal gets a tqdm bar, above which the log's lines go. Elsewhere `say` (default: onto the stream) gets a line
    at most every `line_seconds`, and at the last amount. Amounts are counted in units of `scale`: bytes are shown as MB
    with unit "MB" and scale 1e6.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        first: int = 0,
        unit: str = "",
        scale: float = 1,
        stream: TextIO | None = None,
        say: Callable[[str], object] | None = None,
        line_seconds: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._first, self._done = title, total, first, first
        self._unit, self._scale = unit, scale
        self._stream = stream if stream is not None else sys.stderr
        self._say = say if say is not None else self._write_line
        self._line_seconds = line_seconds
        self._clock = clock
        self._start = clock()
        self._shown: float | None = None
        self._said = -1  # the amount of the last line
        self._bar: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            loggers = [found for found in (logging.getLogger(), logging.getLogger(_PACKAGE)) if found.handlers]
            self._stack.enter_context(logging_redirect_tqdm(loggers))
            self._bar = tqdm(
                total=self._total, initial=self._first, file=self._stream, dynamic_ncols=True, mininterval=0,
                bar_format="{percentage:3.0f}% |{bar}| {desc}",
            )  # fmt: skip
            self._stack.callback(self._bar.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def advance(self, amount: int) -> None:
        """Count more work as done, and show it if the last time is long enough ago."""
        self.reach(self._done + amount)

    def reach(self, done: int, text: str | None = None, line: bool = False) -> None:
        """The work stands at `done`. `text`: what is shown beside it, at the first amount already (default: speed, and
        time left by the average).

        line: write a line whatever the time, on a terminal too.
        """
        self._done = done
        now = self._clock()
        every = self._line_seconds if self._bar is None else BAR_SECONDS
        last = self._bar is None and done >= self._total
        first = self._shown is None and text is not None  # a speed is not known so soon
        if first or last or line or now - (self._start if self._shown is None else self._shown) >= every:
            self._show(now, text, line)

    def finish(self) -> None:
        """All is done, whatever the total was thought to be."""
        self._total = self._done
        if self._bar is not None:
            self._bar.total = self._done
        self._show(self._clock(), None, False)
        self._stack.close()

    def _show(self, now: float, text: str | None, line: bool) -> None:
        self._shown = now
        shown = f"{self._title} {self._amount(self._done)}/{self._amount(self._total)}"
        shown += f"{' ' if self._unit else ''}{self._unit}  {self._speed(now) if text is None else text}"
        if self._bar is not None:
            self._bar.set_description_str(shown, refresh=False)
            self._bar.n = self._done
            self._bar.refresh()
        if line or (self._bar is None and self._said != self._done):
            self._said = self._done
            self._say(shown)

    def _amount(self, count: int) -> str:
        return str(count) if self._scale == 1 else f"{count / self._scale:.1f}"

    def _speed(self, now: float) -> str:
        elapsed = max(now - self._start, 1e-9)
        done, left = self._done - self._first, max(0, self._total - self._done)
        part = self._done / self._total if self._total else 1.0
        seconds = elapsed * left / done if done else 0.0
        rate = done / self._scale / elapsed
        return (
            f"{min(1.0, part):.0%}, {rate:,.{0 if self._scale == 1 else 2}f} {self._unit}/s, {duration(seconds)} left"
        )

    def _write_line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """`seconds` as 1:02:03, with days in front where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"
