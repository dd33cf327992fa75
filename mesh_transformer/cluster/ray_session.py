"""The Ray session that a driver starts for its run: a head on this machine, with token authentication.

The token is random, new for each driver, and lies in a file that only this user can read; it is on no command line
and in no log. A head at 127.0.0.1 and its nodes listen on that address alone. At any other address Ray itself listens
on all interfaces of a machine, and what keeps others out is the token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, Self

from mesh_transformer.errors import MeshTransformerError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HOST = "host:"  # Ray's resource of a host is named so and after it
OBJECT_STORE = 256 << 20  # bytes of shared memory for batches on their way

# Of every process of the session. Ray looks for dead nodes every minute by default, and counts them dead much later.
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what Ray would print of other processes into the driver's own output
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # as device_train.py is; Ray's own 15 would wait for whatever else a machine does
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
NODE_SECONDS = 90  # for a node of this machine to start, or to end
ENDING_SECONDS = 30
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105  names a file
_imported_for_loopback = False


class ClusterError(MeshTransformerError, ValueError):
    """What a cluster needs is missing, or does not fit together."""


def check_installed() -> None:
    """Raises ClusterError where Ray, an extra, is missing. Imports nothing."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise ClusterError("train.py and --tpu need the package ray: pip install 'mesh-transformer[ray]'")


@dataclasses.dataclass(frozen=True)
class JoinCommand:
    """How a machine joins: `python ARGUMENTS`, with `environment`, for as long as it is to be a host. This package has
    to be importable there.

    The machine's own `RAY_AUTH_TOKEN_PATH` must name a file there, readable for its user alone (mode 0600), that holds
    the session's `token`; hand that over on a standard input, never on a command line. The command runs until it is
    ended by a SIGTERM to its process, which takes the node with it (never `ray stop`, which ends everybody's).
    """

    arguments: list[str]
    environment: dict[str, str]


class RaySession:
    """A head and its nodes, while it is entered. `address`: of this machine, which all hosts reach."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self._host = address
        self._address = self._folder = self._token = ""
        self._head: subprocess.Popen[str] | None = None
        self._connected = False
        self._numbers = itertools.count()
        self._replies: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._before: dict[str, str | None] = {}
        self._given_up: set[str] = set()
        self._up = 0  # the number of the order to start the head

    @property
    def address(self) -> str:
        """ADDRESS:PORT of the head, once `connect` has waited for it."""
        return self._address

    @property
    def folder(self) -> str:
        """A folder of the session's own on this machine; gone when it ends."""
        return self._folder

    @property
    def token(self) -> str:
        """The secret that every process of the session must show."""
        return self._token

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the head, which takes seconds: `connect` waits for it. Raises ClusterError."""
        check_installed()
        self._check_import()
        self._folder = tempfile.mkdtemp(prefix="mt-ray-", dir="/tmp")  # short: the paths of sockets have a limit
        self._token = _token()
        path = os.path.join(self._folder, "token")
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(self._token)
        # Of all settings, only this makes Ray listen on the loopback interface alone: it is for one machine then.
        one_machine = "0" if self._host == LOOPBACK else "1"
        environment = SETTINGS | {ONE_MACHINE: one_machine, TOKEN_PATH: path, "RAY_TMPDIR": self._folder}
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        with open(self._log, "w") as log:
            self._head = subprocess.Popen(
                [sys.executable, "-m", "mesh_transformer.cluster.ray_head"], text=True, stderr=log,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self._up = self._ask({"address": self._host, "object_store": OBJECT_STORE, "folder": self._folder})
        threading.Thread(target=self._listen, args=(self._head,), name="Ray head", daemon=True).start()

    def connect(self) -> None:
        """Wait for the head, and become its driver; nothing where this process is it. Raises ClusterError."""
        if self._connected:
            return
        import ray  # while the head starts

        said = self._answer(self._up)
        if said["error"]:
            raise ClusterError(f"Ray cannot start a head at {self._host}: {said['error']}")
        self._address = said["address"]
        try:
            ray.init(
                address=self._address, _node_ip_address=self._host, log_to_driver=False, logging_level=logging.ERROR
            )  # fmt: skip
        except (RuntimeError, ConnectionError) as error:
            raise ClusterError(
                f"this process cannot be the driver of Ray at {self._address}: {error} (it can be of one at a time)"
            ) from error
        self._connected = True

    def _check_import(self) -> None:
        """Ray reads once, when it is imported, whether 127.0.0.1 is to stay that. If not, a session there is never
        found, and Ray would look for it for minutes. Raises ClusterError."""
        global _imported_for_loopback
        if "ray" not in sys.modules:
            _imported_for_loopback = self._host == LOOPBACK
        elif self._host == LOOPBACK and not _imported_for_loopback and sys.platform == "linux":
            raise ClusterError(
                "this process imported ray before it came to hosts of this machine, and Ray would look for them at "
                "another address: start a new Python process, and leave the import of ray to mesh_transformer"
            )

    def stop(self) -> None:
        """End the head and the nodes of this machine. Never raises."""
        head, self._head = self._head, None
        if head is not None:
            if self._connected:
                import ray

                with contextlib.suppress(Exception):
                    ray.shutdown()
            self._connected = False
            if head.stdin is not None:
                head.stdin.close()  # which is the sign to end
            try:
                head.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the processes of Ray did not end in %d s; they are left behind", ENDING_SECONDS)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_local(self, name: str) -> None:
        """Start a node on this machine as the host `name`, again where there was one. Raises ClusterError.

        Any thread may call this; nodes start side by side.
        """
        self._do("add", name, resources=resources(name))

    def remove_local(self, name: str) -> None:
        """End what is left of a node of this machine."""
        self._do("remove", name)

    def running_local(self) -> set[str]:
        """The names of this machine's nodes of which every process lives, which Ray itself notices only later."""
        return set(self._do("look", "all")["running"])

    def _do(self, what: str, name: str, **more: Any) -> dict[str, Any]:
        reply = self._answer(self._ask({"do": what, "name": name, **more}))
        if reply["error"]:
            raise ClusterError(f"Ray cannot {what} the node of {name} on this machine: {reply['error']}")
        return reply

    def _ask(self, order: Mapping[str, Any]) -> int:
        """Give the head an order; its number, for `_answer`."""
        number = next(self._numbers)
        self._replies[number] = queue.Queue()
        if self._head is None or self._head.stdin is None:
            raise ClusterError("the Ray session has ended")
        try:
            self._head.stdin.write(json.dumps(dict(order) | {"number": number}) + "\n")
            self._head.stdin.flush()
        except OSError as error:
            raise ClusterError(
                f"Ray's head on this machine has ended ({self._last_line()}): start the run again"
            ) from error
        return number

    def _answer(self, number: int) -> dict[str, Any]:
        """Wait for what the head says to an order."""
        try:
            return self._replies[number].get(timeout=NODE_SECONDS)
        except queue.Empty:
            return {"error": f"no answer in {NODE_SECONDS} s"}
        finally:
            del self._replies[number]

    def _listen(self, head: subprocess.Popen[str]) -> None:
        for line in head.stdout or ():
            reply = json.loads(line)
            waiting = self._replies.get(reply["number"])
            if waiting is not None:
                waiting.put(reply)
        for waiting in list(self._replies.values()):
            waiting.put({"error": self._last_line()})

    @property
    def _log(self) -> str:
        return os.path.join(self._folder, "head.log")

    def _last_line(self) -> str:
        """The last line that the head has to say."""
        try:
            with open(self._log, errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:  # the session has ended meanwhile
            lines = []
        return lines[-1] if lines else "it said nothing"

    def join_command(self, name: str, address: str, temp_dir: str) -> JoinCommand:
        """How the machine at `address` joins as the host `name`. `temp_dir`: a folder of its own there, short."""
        arguments = [
            "-m", "mesh_transformer.cluster.ray_start", "start", "--block", f"--address={self.address}",
            f"--node-ip-address={address}", f"--temp-dir={temp_dir}", "--disable-usage-stats", "--num-cpus=1",
            "--include-log-monitor=false",  # nobody reads what it would send
            f"--object-store-memory={OBJECT_STORE}", f"--resources={json.dumps(resources(name))}",
        ]  # fmt: skip
        return JoinCommand(arguments, SETTINGS | {ONE_MACHINE: "1"})

    def alive(self) -> set[str]:
        """The names of the hosts whose nodes Ray counts as alive, but for those that were given up."""
        return {name for name, node in self._nodes() if node not in self._given_up}

    def give_up(self, names: Collection[str]) -> None:
        """Count the nodes that these hosts have now as gone: Ray itself takes seconds to notice, and meanwhile they
        would be taken for those that are started in their place."""
        self._given_up |= {node for name, node in self._nodes() if name in names}

    @staticmethod
    def _nodes() -> list[tuple[str, str]]:
        """(host, Ray's id) of the nodes that Ray counts as alive."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = [(name, str(node["NodeID"])) for node in nodes for name in node["Resources"]]
        return [(name.removeprefix(HOST), node) for name, node in resources if name.startswith(HOST)]

    def wait_for(self, names: Collection[str], seconds: float) -> set[str]:
        """Wait until these hosts have joined, `seconds` at most; those of them that have not."""
        end = time.monotonic() + seconds
        while missing := set(names) - self.alive():
            if time.monotonic() > end:
                return missing
            time.sleep(0.1)
        return set()


@functools.cache
def _token() -> str:
    """One for each process: Ray reads it once, and shows it to every later session too."""
    return secrets.token_hex(32)


def resources(name: str) -> Mapping[str, float]:
    """Ray's resources of the node of a host: one actor computes on it."""
    return {"tpu": 1, f"{HOST}{name}": 1}
