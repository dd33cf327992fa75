"""Reading ahead: an iterator that runs in a thread, a few items in front of whoever takes them."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.1  # how soon a thread with a full queue notices that nobody wants more


class _End:
    """What the thread hands over last: nothing more, or the error that stopped it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """The items of an iterator, read ahead by at most `depth`. An error in the thread is raised at the next `next`."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: _End | None = None

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        """The next item. Raises what the iterator raised, again and again."""
        if self._end is None:
            if self._thread is None:
                self._start()
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; what was read ahead is thrown away."""
        self._stop.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:  # room in the queue lets the thread see at once that it is to stop
                    self._queue.get_nowait()
            self._thread.join()
            self._thread = None
        self._end = self._end or _End()

    def _start(self) -> None:
        # The thread must not hold a reference to this object, or a forgotten one would never be collected.
        self._thread = threading.Thread(
            target=_fill, args=(self._items, self._queue, self._stop), name="prefetch", daemon=True
        )
        weakref.finalize(self, self._stop.set)
        self._thread.start()


def _fill(items: Iterator[T], waiting: queue.Queue[T | _End], stop: threading.Event) -> None:
    end = _End()
    try:
        for item in items:
            if not _put(item, waiting, stop):
                return
    except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to whoever calls next()
        end = _End(error)
    _put(end, waiting, stop)


def _put(item: T | _End, waiting: queue.Queue[T | _End], stop: threading.Event) -> bool:
    """False when nobody waits any more."""
    while not stop.is_set():
        try:
            waiting.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
