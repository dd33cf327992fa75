"""A line in the log when one phase of a run takes long, so that a hang says where it hangs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0


class Watchdog:
    """Logs "still <phase>" every `interval` seconds that the innermost phase lasts, from a thread of its own."""

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        self._phases: list[tuple[str, float]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what the run is doing while the block runs; phases nest, and the innermost one is reported."""
        self._phases.append((name, time.monotonic()))
        try:
            yield
        finally:
            self._phases.pop()

    def _watch(self) -> None:
        # Phases change every few milliseconds, so the watcher wakes by the clock and is never notified of them.
        reported: tuple[str, float] | None = None
        due = 0.0
        with self._changed:
            while not self._closed:
                current = self._phases[-1:]
                now = time.monotonic()
                if not current:
                    reported = None
                elif current[0] != reported:
                    reported, due = current[0], current[0][1] + self._interval
                if reported is not None and now >= due:
                    logger.warning("still %s after %.0f s", reported[0], now - reported[1])
                    due = now + self._interval
                self._changed.wait(self._interval / 4)
