"""The hosts of a TPU VM by name: SSH hosts whose machine may be taken away, and is then deleted and made again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_transformer.cluster import tpu_control, tpu_nodes
from mesh_transformer.cluster.accelerators import accelerator
from mesh_transformer.cluster.hosts import Host, HostError
from mesh_transformer.cluster.ssh import Shell
from mesh_transformer.cluster.ssh_hosts import Sizes, SSHHosts
from mesh_transformer.cluster.tpu_api import Body, TPUApi, TPUError
from mesh_transformer.cluster.tpu_machines import Login
from mesh_transformer.cluster.tpu_nodes import Request

if TYPE_CHECKING:
    from mesh_transformer.cluster.ray_session import RaySession

logger = logging.getLogger(__name__)

UNKNOWN, GONE = "UNKNOWN", "gone"
LOOK_SECONDS = 15.0  # how often at most the API is asked while steps run


class TPUHosts:
    """The `Hosts` of a TPU. `node`: as it was when READY; `hosts`: on its machines."""

    def __init__(
        self, api: TPUApi, name: str, node: Body, hosts: SSHHosts, login: Login, shell: Shell, seconds: float,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:  # fmt: skip
        self._api, self._name, self._node, self._hosts = api, name, node, hosts
        self._login, self._shell, self._seconds = login, shell, seconds
        self._look_seconds, self._looked = look_seconds, float("-inf")

    @property
    def address(self) -> str:
        return self._hosts.address

    def start(self, session: RaySession) -> Sequence[Host]:
        return self._hosts.start(session)

    def check(self) -> None:
        try:
            self._hosts.check()
        except HostError as error:
            self._look()  # what the API knows says more
            raise error
        if time.monotonic() - self._looked > self._look_seconds:
            self._look()

    def _look(self) -> None:
        """Raises HostError where the TPU is not READY; an API that does not answer says nothing about the TPU."""
        self._looked = time.monotonic()
        state = self._state()[0]
        if state not in (tpu_nodes.READY, UNKNOWN):
            raise HostError(f"TPU {self._name} is {state}")

    def _state(self) -> tuple[str, Body | None]:
        """What the API says now, UNKNOWN where it says nothing."""
        try:
            node = self._api.get(f"nodes/{self._name}")
        except TPUError as error:
            logger.warning("%s", error)
            return UNKNOWN, None
        return str((node or {}).get("state", GONE)), node

    def restore(self) -> Sequence[Host]:
        state, node = self._state()
        same = node is not None and node.get("id") == self._node.get("id")
        if state == UNKNOWN or (state == tpu_nodes.READY and same):
            try:
                return self._hosts.restore()
            except HostError:
                state, node = self._state()
                if state in (tpu_nodes.READY, UNKNOWN):
                    raise  # the TPU is there: to delete it is not this program's to decide
        self._hosts.stop()
        if state in (*tpu_nodes.LOST, GONE):
            lost = self._node | {"state": state}
            self._node = tpu_control.again(self._api, self._name, lost, self._login, self._seconds)
        else:  # on its way, or made again by somebody else
            self._node = tpu_control.ensure(self._api, self._name, None, self._login, self._seconds)
        machines = tpu_control.reach(self._api, self._name, self._node, self._login, self._shell)
        return self._hosts.replace(machines)

    def stop(self) -> None:
        self._hosts.stop()
        logger.info(
            "TPU %s is still there, and costs: python scripts/tpu.py delete %s --tpu_region %s",
            self._name, self._name, self._api.zone,
        )  # fmt: skip


def from_tpu(
    api: TPUApi,
    name: str,
    request: Request | None,
    login: Login,
    shell: Shell,
    logs: Path,
    seconds: float,
    *,
    per_host: int | None = None,
    check: Callable[[Sequence[int]], None] = lambda devices: None,
    address: str | None = None,
) -> TPUHosts:
    """Makes or finds the TPU, waits for READY, and reaches its machines. `per_host`, `check`: as of `Sizes`.

    Raises TPUError, HostError, ConfigError.
    """
    node = tpu_control.ensure(api, name, request, login, seconds)
    kind = accelerator(str(node["acceleratorType"]))
    if kind.devices is not None and per_host is None:
        check(_even(kind.devices, len(tpu_nodes.endpoints(node))))
    machines = tpu_control.reach(api, name, node, login, shell)
    sizes = Sizes(per_host, kind.devices_per_chip, True, check)
    hosts = SSHHosts(machines, shell, logs, sizes, address=address)
    return TPUHosts(api, name, node, hosts, login, shell, seconds)


def _even(devices: int, hosts: int) -> list[int]:
    """The devices of each host."""
    return [devices // hosts] * hosts
