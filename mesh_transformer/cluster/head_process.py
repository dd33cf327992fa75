"""The driver's side of the process that owns a session's head, `ray_head`: it is started, told what to do, and ended.

Orders and answers are JSON, one object a line; each has a number, and answers come in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mesh_transformer.errors import ClusterError

START_SECONDS = 180  # for the head, on a machine that is busy
ORDER_SECONDS = 90  # for a node to start, or to end
ENDING_SECONDS = 30


class HeadProcess:
    """The process, begun, in which a head at `address` comes up meanwhile. `folder`: of its log and of Ray's files."""

    def __init__(self, address: str, folder: str, object_store: int) -> None:
        self._host = address
        self._numbers = itertools.count()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._ended: str | None = None  # what is said to orders that come too late
        self._lock = threading.Lock()  # of the three above
        self._listener = threading.Thread(target=self._listen, name="Ray head", daemon=True)
        self._log = open(os.path.join(folder, "head.log"), "w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mesh_transformer.cluster.ray_head", folder], text=True, stderr=self._log,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        try:
            self._listener.start()
            self._up = self._order({"address": address, "object_store": object_store})
        except BaseException:
            self.end()
            raise

    def wait(self) -> str:
        """Wait until the head is up; its ADDRESS:PORT. Raises ClusterError."""
        return str(self._answer(self._up, f"start a head at {self._host}", START_SECONDS)["address"])

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        """Start a node, once the head is up. Any thread may. Raises ClusterError."""
        self._do({"do": "add", "name": name, "resources": dict(resources)}, f"start the node of {name}")

    def remove(self, name: str) -> None:
        """End what is left of a node. Raises ClusterError."""
        self._do({"do": "remove", "name": name}, f"end the node of {name}")

    def running(self) -> set[str]:
        """The nodes of which every process lives. Raises ClusterError."""
        return set(self._do({"do": "look"}, "tell which nodes of this machine run")["running"])

    def _do(self, order: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        self.wait()  # which is not part of a node's time
        return self._answer(self._order(order), what, ORDER_SECONDS)

    def _order(self, order: Mapping[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                answer.set_result({"error": self._ended})
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
        """Hand every answer to who waits for it, until the process has ended."""
        for line in self._process.stdout or ():
            with contextlib.suppress(ValueError, KeyError):  # what is no answer is nobody's
                said = json.loads(line)
                with self._lock:
                    answer = self._answers.pop(said["number"])
                answer.set_result(said)
        with self._lock:
            self._ended = f"the head's process has ended ({self._last_line()}): start the run again"
            left, self._answers = list(self._answers.values()), {}
        for answer in left:
            answer.set_result({"error": self._ended})

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        """End the head and the nodes of this machine. Never raises."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # of what could not be written when it ended
                self._process.stdin.close()  # which is the sign to end
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        with contextlib.suppress(OSError):  # of one that was killed, or takes too long, Ray's processes are left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._listener.is_alive():
            self._listener.join(ENDING_SECONDS)
        self._log.close()
