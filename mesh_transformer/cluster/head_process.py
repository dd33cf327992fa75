"""The driver's side of the process that owns a session's head, `ray_head`: it is started, told what to do, and ended.

Orders and answers are JSON, one object a line; each has a number, and answers come in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mesh_transformer.errors import ClusterError

logger = logging.getLogger(__name__)

START_SECONDS = 180  # for the head, on a machine that is busy
ORDER_SECONDS = 90  # for a node to start, or to end
ENDING_SECONDS = 30


class HeadProcess:
    """The process, begun, in which a head at `address` comes up meanwhile. `folder`: of its log and of Ray's files."""

    def __init__(self, address: str, folder: str, object_store: int) -> None:
        self._host, self._log = address, os.path.join(folder, "head.log")
        self._numbers = itertools.count()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._ended: str | None = None  # the last that it had to say
        self._lock = threading.Lock()  # of the three above
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mesh_transformer.cluster.ray_head"], text=True, stderr=log,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        threading.Thread(target=self._listen, name="Ray head", daemon=True).start()
        self._up = self._order({"address": address, "object_store": object_store, "folder": folder})

    def wait(self) -> str:
        """Wait until the head is up; its ADDRESS:PORT. Raises ClusterError."""
        return str(self._answer(self._up, f"start a head at {self._host}", START_SECONDS)["address"])

    def do(self, what: str, name: str, **more: Any) -> Mapping[str, Any]:
        """Have the head, once it is up, do something about the node of a host. Any thread may. Raises ClusterError."""
        self.wait()  # which is not part of a node's time
        order = self._order({"do": what, "name": name, **more})
        return self._answer(order, f"{what} the node of {name} on this machine", ORDER_SECONDS)

    def _order(self, order: Mapping[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                answer.set_result({"error": f"its process has ended ({self._ended}): start the run again"})
                return answer
            number = next(self._numbers)
            self._answers[number] = answer
            if self._process.stdin is not None:
                with contextlib.suppress(OSError, ValueError):  # it has ended, which `_listen` is about to tell
                    self._process.stdin.write(json.dumps(dict(order) | {"number": number}) + "\n")
                    self._process.stdin.flush()
        return answer

    @staticmethod
    def _answer(answer: Future[dict[str, Any]], what: str, seconds: float) -> dict[str, Any]:
        try:
            said = answer.result(seconds)
        except TimeoutError:
            said = {"error": f"no answer in {seconds} s"}
        if said["error"]:
            raise ClusterError(f"Ray cannot {what}: {said['error']}")
        return said

    def _listen(self) -> None:
        try:
            for line in self._process.stdout or ():
                said = json.loads(line)
                with self._lock:
                    answer = self._answers.pop(said["number"])
                answer.set_result(said)
        finally:
            with self._lock:
                self._ended = self._last_line()
                left, self._answers = list(self._answers.values()), {}
            for answer in left:
                answer.set_result({"error": self._ended})

    def _last_line(self) -> str:
        try:
            with open(self._log, errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:  # the session's folder is gone already
            lines = []
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        """End the head and the nodes of this machine. Never raises."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # of what could not be written when it ended
                self._process.stdin.close()  # which is the sign to end
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the processes of Ray did not end in %d s; they are left behind", ENDING_SECONDS)
