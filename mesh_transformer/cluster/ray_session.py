"""The Ray session that a driver starts for its run: a head on this machine, with token authentication.

The token is random, new for each driver, and lies in a file that only this user can read; it is on no command line
and in no log. A head at 127.0.0.1 and its nodes listen on that address alone. At any other address Ray itself listens
on all interfaces of a machine, and what keeps others out is the token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from typing import Self

from mesh_transformer.cluster.head_process import HeadProcess
from mesh_transformer.errors import ClusterError

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
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105  names a file
_imported_for_loopback = False


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
        self._head: HeadProcess | None = None
        self._begun = self._connected = False
        self._before: dict[str, str | None] = {}
        self._given_up: set[str] = set()

    @property
    def address(self) -> str:
        """ADDRESS:PORT of the head. Raises ClusterError before `connect` has waited for it."""
        if not self._address:
            raise ClusterError("the head's address is known once connect() has waited for it")
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
        self._head = HeadProcess(self._host, self._folder, OBJECT_STORE)

    def connect(self) -> None:
        """Wait for the head, and become its driver; nothing where this process is it. Raises ClusterError."""
        if self._connected:
            return
        import ray  # while the head starts

        self._address = self._the_head().wait()
        if ray.is_initialized():
            raise ClusterError("this process is the driver of a Ray already, and can be of one at a time")
        self._begun = True  # and has to be ended, also where it fails
        try:
            ray.init(
                address=self._address, _node_ip_address=self._host, log_to_driver=False, logging_level=logging.ERROR
            )  # fmt: skip
        except (RuntimeError, ConnectionError) as error:
            raise ClusterError(f"this process cannot be the driver of Ray at {self._address}: {error}") from error
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
        begun, self._begun, self._connected = self._begun, False, False
        if begun:
            import ray

            with contextlib.suppress(Exception):
                ray.shutdown()
        if head is not None:
            head.end()
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
        self._the_head().add(name, resources(name))

    def remove_local(self, name: str) -> None:
        """End what is left of a node of this machine."""
        self._the_head().remove(name)

    def running_local(self) -> set[str]:
        """The names of this machine's nodes of which every process lives, which Ray itself notices only later."""
        return self._the_head().running()

    def _the_head(self) -> HeadProcess:
        if self._head is None:
            raise ClusterError("the Ray session has ended")
        return self._head

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
