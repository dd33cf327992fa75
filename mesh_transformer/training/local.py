"""A training run on this process's devices: what device_train.py does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from mesh_transformer.config import Config, mesh_notice
from mesh_transformer.mesh import DP, choose_platform, describe, find_devices, make_mesh
from mesh_transformer.planning.check import device_memory
from mesh_transformer.training import session
from mesh_transformer.training.executor import Hardware, NetworkMachine
from mesh_transformer.training.session import Ask, ask_on_terminal
from mesh_transformer.transformer_zero import network_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(session.Request):
    """The options of device_train.py, under their names."""

    platform: str | None = None
    devices: int | None = None


def train(request: Request, *, ask: Ask = ask_on_terminal, command: Sequence[str] = ("device_train.py",)) -> int:
    """Runs what `request` asks for and returns the exit code; see `session.train`."""

    @contextlib.contextmanager
    def start_devices(config: Config) -> Iterator[LocalDevices]:
        choose_platform(request.platform, request.devices)
        devices = find_devices(request.platform, request.devices)
        mesh = make_mesh(config, devices)
        logger.info("%s", describe(mesh))
        notice = mesh_notice(config, len(devices))
        if notice:
            logger.info("%s", notice)
        yield LocalDevices(mesh)

    return session.train(request, start_devices, command=command, ask=ask)


class LocalDevices:
    """The devices of this process, as the mesh `mesh`."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh

    @property
    def dp(self) -> int:
        return int(self._mesh.shape[DP])

    @property
    def hardware(self) -> Hardware:
        device = self._mesh.devices.flat[0]
        return Hardware(device.device_kind, self._mesh.size, device_memory(device, self._mesh.size))

    def hold(self, config: Config) -> NetworkMachine:
        return NetworkMachine(network_of(config, self._mesh))

    def supervise(self, attempt: Callable[[], T], progress: Callable[[], object]) -> T:
        """Devices of this process are lost with the process alone."""
        return attempt()
