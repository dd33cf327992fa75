"""The devices of a cluster's hosts, and what becomes of a run when hosts are lost under it.

At the first sign of a fault every process is ended (`crew`), the hosts are made well again, fresh processes start, and
the run goes on from its last complete checkpoint, with the data position that it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mesh_transformer.cluster.crew import Crew
from mesh_transformer.cluster.hosts import HostError, Hosts
from mesh_transformer.cluster.pod_executor import Deadline, PodMachine
from mesh_transformer.cluster.ray_session import RaySession
from mesh_transformer.config import Config, check_mesh
from mesh_transformer.errors import ConfigError
from mesh_transformer.training.executor import Hardware

if TYPE_CHECKING:
    from mesh_transformer.cluster.worker import Joined

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RESTARTS = 10
PAUSE_SECONDS = 1.0  # before the second restart without progress, twice that before the third, ...
LONGEST_PAUSE = 60.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """max_restarts: in a row without a new checkpoint.  step_deadline: seconds that a step may take; None goes by how
    long steps took."""

    max_restarts: int = MAX_RESTARTS
    step_deadline: float | None = None


class Pod:
    """A cluster whose processes have joined. `dp`: replicas of the mesh of the config that it was started for."""

    def __init__(self, hosts: Hosts, crew: Crew, patience: Patience, config: Config) -> None:
        self._hosts, self._crew, self._patience = hosts, crew, patience
        self._dp = check_mesh(config, self._joined.devices)[0]

    @property
    def _joined(self) -> Joined:
        return self._crew.joined[0]

    @property
    def dp(self) -> int:
        return self._dp

    @property
    def hardware(self) -> Hardware:
        return Hardware(self._joined.device_kind, self._joined.devices, self._joined.memory)

    @property
    def crew(self) -> Crew:
        """The processes as they are now."""
        return self._crew

    def hold(self, config: Config) -> PodMachine:
        return PodMachine(self._crew, config, Deadline(self._patience.step_deadline))

    def supervise(self, attempt: Callable[[], T], progress: Callable[[], object]) -> T:
        """Calls `attempt` again after each HostError, on fresh processes.

        Raises HostError after `max_restarts` without progress.
        """
        restarts, reached = 0, progress()
        while True:
            try:
                if restarts and not self._crew.alive:
                    if restarts > 1:
                        time.sleep(min(PAUSE_SECONDS * 2 ** (restarts - 2), LONGEST_PAUSE))
                    self.start_again()
                return attempt()
            except HostError as error:
                self._crew.end()
                if progress() != reached:
                    restarts, reached = 0, progress()
                restarts += 1
                if restarts > self._patience.max_restarts:
                    raise HostError(
                        f"{error}. This was fault {restarts} since the last new checkpoint, and --max-restarts is "
                        f"{self._patience.max_restarts}: look at the hosts, then run the same command again"
                    ) from error
                logger.warning(
                    "a fault %s. All processes were ended; fresh ones go on from %s (restart %d of %d)", error,
                    f"step {reached}" if reached is not None else "the beginning", restarts,
                    self._patience.max_restarts,
                )  # fmt: skip

    def start_again(self) -> None:
        """Make the hosts well, and start fresh processes on them. Raises HostError."""
        began = time.monotonic()
        self._crew.end()
        self._crew = Crew(self._hosts.restore(), self._hosts.check)
        self._crew.start()
        logger.info("%d hosts are there again after %.1f s", len(self._crew.hosts), time.monotonic() - began)


@contextlib.contextmanager
def started(hosts: Hosts, config: Config, patience: Patience) -> Iterator[Pod]:
    """The pod of these hosts, until the block ends. Raises HostError, ClusterError, ConfigError and DeviceError."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(RaySession(hosts.address))
        stack.callback(hosts.stop)
        found = hosts.start(session)
        session.connect()  # for hosts that did without until now
        crew = Crew(found, hosts.check)
        stack.callback(lambda: pod.crew.end() if pod is not None else crew.end())
        pod: Pod | None = None
        crew.start()
        joined = crew.joined[0]
        _check_size(config, joined.devices)
        pod = Pod(hosts, crew, patience, config)
        logger.info(
            "%d hosts with %d %s devices (%s) each, mesh dp %d x mp %d; ready in %.1f s", len(crew.hosts),
            joined.local_devices, joined.platform, joined.device_kind, pod.dp, config.mesh.cores_per_replica,
            time.monotonic() - began,
        )  # fmt: skip
        yield pod


def _check_size(config: Config, devices: int) -> None:
    """Raises ConfigError where the pod is not of the size that the config names."""
    size = config.mesh.tpu_size
    if size is not None and size != devices:
        raise ConfigError(
            f"tpu_size is {size} in the config, and the hosts have {devices} devices together: change tpu_size, or use "
            "other hosts"
        )
