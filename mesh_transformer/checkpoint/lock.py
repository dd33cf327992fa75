"""One trainer per model_dir: a small file that says which process holds it.

A holder on this machine is alive if its process is; one on another machine, if it has renewed the file lately. So a
trainer that was killed never blocks the next one here, and blocks one elsewhere for a few minutes at most.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
import time
from typing import Any

from mesh_transformer import storage
from mesh_transformer.errors import CheckpointError, StorageError

NAME = "trainer.lock"
RENEW_EVERY = 60.0  # seconds
STALE_AFTER = 600.0  # seconds without renewal, for a holder on another machine

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """`started` tells a process from a later one with the same id; `renewed` is the holder's clock, in seconds."""

    host: str
    pid: int
    started: str
    renewed: float

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def alive(self, now: float) -> bool:
        if self.host == socket.gethostname():
            return _start_of(self.pid) == self.started
        return now - self.renewed < STALE_AFTER


class Lock:
    """Held between `acquire` and `release`; renewed from a thread meanwhile. Usable as a context manager."""

    def __init__(self, folder: storage.PathLike, renew_every: float = RENEW_EVERY) -> None:
        self.path = storage.join(folder, NAME)
        self._folder = storage.normalise(folder)
        self._renew_every = renew_every
        self._content: bytes | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def acquire(self) -> None:
        """Raises CheckpointError naming the process that holds the folder, StorageError if it cannot be written."""
        storage.makedirs(self._folder)
        found = _read(self.path)
        if found is not None:
            holder = _parse(found)
            if holder is not None and holder.alive(time.time()):
                raise CheckpointError(self._held_by(holder))
            if holder is not None:
                logger.warning("%s: process %d on %s is gone; taking over", self._folder, holder.pid, holder.host)
        content = self._mine()
        if not storage.swap(self.path, found, content):
            raise CheckpointError(f"{self._folder}: another trainer started at the same moment; try again")
        self._content, self._lost = content, False
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, name="checkpoint lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError if another trainer has taken the folder from this one."""
        if self._lost:
            raise CheckpointError(
                f"{self._folder}: another trainer took it over while this one did not answer; stopping, so that they "
                "do not overwrite each other"
            )

    def release(self) -> None:
        if self._content is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            storage.swap(self.path, self._content, None)
        except StorageError as error:
            logger.warning("%s; the next trainer will find it stale", error)
        self._content = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._stop.wait(self._renew_every):
            content = self._mine()
            try:
                if not storage.swap(self.path, self._content, content):
                    self._lost = True
                    logger.error("%s was taken over by another trainer", self.path)
                    return
                self._content = content
            except StorageError as error:
                logger.warning("cannot renew: %s", error)

    def _held_by(self, holder: Holder) -> str:
        return (
            f"{self._folder} is in use by process {holder.pid} on {holder.host}: wait for it, stop it, or choose "
            f"another model_dir (if it is surely gone, delete {self.path})"
        )

    @staticmethod
    def _mine() -> bytes:
        pid = os.getpid()
        return Holder(socket.gethostname(), pid, _start_of(pid), time.time()).to_bytes()


def _read(path: str) -> bytes | None:
    try:
        return storage.read_bytes(path) or None
    except StorageError:
        if storage.exists(path):
            raise
        return None


def _parse(content: bytes) -> Holder | None:
    """None for a file that a dying writer left half written."""
    try:
        fields: dict[str, Any] = json.loads(content)
        return Holder(str(fields["host"]), int(fields["pid"]), str(fields["started"]), float(fields["renewed"]))
    except (ValueError, KeyError, TypeError):
        return None


def _start_of(pid: int) -> str:
    """When a process started, as its kernel says; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"  # no /proc here (macOS): only whether it lives is known
