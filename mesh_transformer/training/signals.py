"""SIGTERM and Ctrl-C ask the loop to stop after the current step; a second Ctrl-C stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class StopRequest:
    """Notes the first SIGTERM or SIGINT while it is entered; `requested` is its name, or None.

    The loop asks between steps, so that a save never starts from half an update. A second SIGINT raises
    KeyboardInterrupt on the spot, for when the save itself takes too long. Outside the main thread, where Python
    allows no handlers, only `request` stops the run.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def request(self, name: str) -> None:
        """Ask for the stop; `name` says who did, e.g. "SIGTERM"."""
        self.requested = self.requested or name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
        logger.warning("%s received: saving after the current step, then stopping", self.requested)
