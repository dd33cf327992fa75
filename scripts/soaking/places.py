"""Where the hosts of scripts/soak_pods.py are: processes of this machine, or machines in namespaces, by ssh."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from scripts.soaking import sshd_hosts


@dataclasses.dataclass(frozen=True)
class Process:
    """What /proc says of one."""

    pid: int
    parent: int
    title: str


def processes() -> list[Process]:
    """All of this machine."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                title = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended meanwhile
                continue
            found.append(Process(int(entry), parent, title))
    return found


def below(root: int) -> list[Process]:
    """The descendants of a process."""
    everything, found, reached = processes(), [], {root}
    grown = True
    while grown:
        new = [each for each in everything if each.parent in reached and each.pid not in reached]
        found += new
        reached |= {each.pid for each in new}
        grown = bool(new)
    return found


class Place(Protocol):
    """The hosts of a soak."""

    @property
    def words(self) -> list[str]:
        """The options of train.py that name them."""

    def processes(self, driver: int) -> list[Process]:
        """All that runs on them for this driver."""

    def cut(self, host: int) -> None:
        """Cut a host's network."""

    def mend(self, host: int) -> None:
        """Join it again."""


class Here:
    """Processes of this machine, below the driver, whose network is the machine's own."""

    def __init__(self, hosts: int) -> None:
        self.words = ["--tpu", "local", "--hosts", str(hosts)]

    def processes(self, driver: int) -> list[Process]:
        return below(driver)

    def cut(self, host: int) -> None:
        raise NotImplementedError("hosts without a network of their own")

    mend = cut


class Apart:
    """Machines of their own, each in a network namespace of this one, that ssh reaches."""

    def __init__(self, network: sshd_hosts.Network, file: Path) -> None:
        self.words = ["--hosts-file", str(file)]
        self._network = network
        self.cut, self.mend = network.cut, network.mend

    def processes(self, driver: int) -> list[Process]:
        theirs = {pid for number in range(len(self._network.addresses)) for pid in self._network.pids(number)}
        return [each for each in processes() if each.pid in theirs]


@contextlib.contextmanager
def place(hosts: int, apart: bool) -> Iterator[Place]:
    """The hosts while the block runs. Raises UnavailableError."""
    if not apart:
        yield Here(hosts)
        return
    with sshd_hosts.sshd_hosts(namespaces=hosts) as made:
        assert made.network is not None  # noqa: S101
        yield Apart(made.network, made.hosts_file(f"python={sys.executable}"))
