"""Hosts that are processes of this machine, each a Ray node with simulated devices: a pod on a laptop."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mesh_transformer.cluster.hosts import Host, HostError
from mesh_transformer.cluster.ray_session import LOOPBACK

if TYPE_CHECKING:
    from mesh_transformer.cluster.ray_session import RaySession

logger = logging.getLogger(__name__)

NODE_SECONDS = 60.0  # for a node to join
TRIES = 3


class LocalHosts:
    """`count` hosts of `devices` simulated CPU devices each."""

    address = LOOPBACK

    def __init__(self, count: int, devices: int) -> None:
        self._names = [f"local-{number}" for number in range(count)]
        self._devices = devices
        self._session: RaySession | None = None

    def start(self, session: RaySession) -> Sequence[Host]:
        """Start all nodes, a few at a time; the hosts. Raises HostError naming those that did not join."""
        self._session = session
        self._add(self._names)
        return [Host(name, self.address, self._devices, "cpu") for name in self._names]

    def check(self) -> None:
        """Raises HostError naming the hosts whose nodes have ended."""
        gone = self._gone()
        if gone:
            raise HostError(f"{', '.join(gone)}: the Ray node is gone")

    def restore(self) -> Sequence[Host]:
        """Start again the nodes that have ended. Raises HostError where one does not join."""
        session = self._the_session()
        for attempt in range(TRIES):
            gone = self._gone()
            if not gone:
                break
            try:
                logger.info("starting the Ray node of %s again", ", ".join(gone))
                session.give_up(gone)
                self._add(gone)
            except HostError:
                if attempt == TRIES - 1:
                    raise
        return [Host(name, self.address, self._devices, "cpu") for name in self._names]

    def stop(self) -> None:
        """The session ends its nodes itself, without a word to the driver."""
        self._session = None

    def _gone(self) -> list[str]:
        if self._session is None:
            return []
        well = self._session.alive() & self._session.running_local()
        return [name for name in self._names if name not in well]

    def _add(self, names: Sequence[str]) -> None:
        session = self._the_session()
        # No more at a time than the machine has cores: a node gives up that does not come up in half a minute.
        pool = ThreadPoolExecutor(min(len(names), os.cpu_count() or 1))
        try:
            adding = [pool.submit(session.add_local, name) for name in names]
            session.connect()  # meanwhile
            for each in adding:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
        missing = session.wait_for(names, NODE_SECONDS)
        if missing:
            raise HostError(f"{', '.join(sorted(missing))}: the Ray node did not join in {NODE_SECONDS:.0f} s")

    def _the_session(self) -> RaySession:
        if self._session is None:
            raise HostError("the hosts were stopped")
        return self._session
