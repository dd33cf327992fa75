"""Where the hosts of a cluster come from: what this machine, a list of machines and a TPU's name have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mesh_transformer.errors import MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.cluster.ray_session import RaySession


class HostError(MeshTransformerError):
    """A host, or several, cannot go on: the message names each, what was being done, and what was seen.

    A run that meets one starts anew from its last complete checkpoint, as often as --max-restarts allows.
    """


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine of the cluster, or what stands for one.

    name: in messages, and in Ray's resource "host:NAME", so of letters, digits, `.`, `_` and `-`.  address: at which
    the other hosts reach it.  devices: how many it must have, None where that is found out on it.  platform: which
    JAX is to use there, None for the one found first.  log: where what it says is kept on this machine, for messages.
    """

    name: str
    address: str
    devices: int | None = None
    platform: str | None = None
    log: str = ""


class Hosts(Protocol):
    """The hosts of one cluster, from the first request to the end. All methods are called from one thread."""

    @property
    def address(self) -> str:
        """The address of this machine that all hosts reach; 127.0.0.1 where they are processes of this machine.

        Known before `start`; the session's head listens there.
        """

    def start(self, session: RaySession) -> Sequence[Host]:
        """Make every host ready and join its Ray node to the session, all in parallel; the hosts in a fixed order.

        The session's head is starting meanwhile: `session.connect()`, which nodes by `session.join_command` need, waits
        for it.
        Raises HostError naming the host and the step that failed, with the failing line and where the log is, and
        other MeshTransformerErrors for what the user can correct. What had been started is stopped then by `stop`.
        """

    def check(self) -> None:
        """Raises HostError naming the hosts that are gone and what was seen (preempted, node ended, unreachable ...).

        Called every few seconds while steps run, and after a fault to say what happened: quick, with few requests.
        """

    def restore(self) -> Sequence[Host]:
        """After a fault: end what is left of hosts that are not well, make them again, and wait with back-off.

        Returns all hosts, in the order of `start`, each with a Ray node that is alive. Raises HostError where a host
        does not come back.
        """

    def stop(self) -> None:
        """End the Ray nodes and what else was started, but no machine that was there before. Never raises."""
