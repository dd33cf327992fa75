"""The queue in front of the batch: bounded, and fair between clients."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What waits here: `client` says whose it is."""

    @property
    def client(self) -> str: ...


T = TypeVar("T", bound=Queued)


class FairQueue(Generic[T]):
    """First come, first served for each client; between clients one each in turn, so that nobody waits behind all of
    another's. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[T]:
        return (each for line in self._of.values() for each in line)

    def add(self, item: T) -> None:
        self._of.setdefault(item.client, deque()).append(item)

    def take(self) -> T | None:
        """The next one, whose client goes to the end of the round; None when nobody waits."""
        if not self._of:
            return None
        client, line = next(iter(self._of.items()))
        item = line.popleft()
        if line:
            self._of.move_to_end(client)
        else:
            del self._of[client]
        return item

    def remove(self, item: T) -> bool:
        """Takes an item out of the middle; whether it was there."""
        line = self._of.get(item.client)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._of[item.client]
        return True

    def clear(self) -> list[T]:
        """Empties the queue; returns what was in it."""
        items = list(self)
        self._of.clear()
        return items
