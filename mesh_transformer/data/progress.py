"""How far a long piece of work is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 30
_BAR_EVERY_S, _LINE_EVERY_S = 0.1, 10.0


class Progress:
    """Reports amounts in megabytes (or in `unit`s of `scale`) of a known total. Use as: advance(n) ..., then done()."""

    def __init__(
        self,
        title: str,
        total: int,
        out: TextIO,
        unit: str = "MB",
        scale: float = 1e6,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._total = total
        self._out = out
        self._unit = unit
        self._scale = scale
        self._clock = clock
        self._bar = out.isatty()
        self._done = 0
        self._start = self._shown = clock()

    def advance(self, amount: int) -> None:
        """Count more work as done, and show it if the last time is long enough ago."""
        self._done += amount
        now = self._clock()
        if now - self._shown >= (_BAR_EVERY_S if self._bar else _LINE_EVERY_S):
            self._shown = now
            self._show(now)

    def done(self) -> None:
        """Show the end."""
        self._show(self._clock())
        if self._bar:
            self._out.write("\n")
        self._out.flush()

    def _show(self, now: float) -> None:
        elapsed = max(now - self._start, 1e-9)
        part = min(1.0, self._done / self._total) if self._total else 1.0
        rate = self._done / self._scale / elapsed
        left = elapsed * (1 - part) / part if part else 0.0
        text = (
            f"{self._title} {part:4.0%} {self._done / self._scale:.1f}/{self._total / self._scale:.1f} {self._unit}, "
            f"{rate:.2f} {self._unit}/s, {_clock_time(left)} left"
        )
        if self._bar:
            full = round(part * _BAR_WIDTH)
            self._out.write(f"\r[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {text}\x1b[K")
        else:
            self._out.write(text + "\n")
        self._out.flush()


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
