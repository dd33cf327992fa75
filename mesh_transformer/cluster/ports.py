"""Free ports of this machine, for programs that must be told theirs before they take it."""

from __future__ import annotations

import errno
import random
import socket
import threading

# Below are those that `ray start` gives to processes that compute; above, where the system's own choices begin, any
# connection may take one.
FIRST = 20000
TRIES = 10000
FEWEST = 1000  # in between; a machine with fewer gives what it chooses itself
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"

_given: set[int] = set()
_giving = threading.Lock()


def free_ports(address: str, count: int) -> list[int]:
    """Ports at this machine's IPv4 `address` that nobody listens on; none that this process was given before.

    Raises OSError where the address is not this machine's, or no port is left.
    """
    first, last = FIRST, _first_of_system()
    found: list[int] = []
    with _giving:
        for _ in range(TRIES + count):
            if len(found) == count:
                return found
            wanted = random.SystemRandom().randrange(first, last) if last - first >= FEWEST else 0
            with socket.socket() as probe:
                try:
                    probe.bind((address, wanted))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue
                port = int(probe.getsockname()[1])
            if port not in _given:
                _given.add(port)
                found.append(port)
    raise OSError(errno.EADDRINUSE, f"no port is free at {address}, found in {TRIES} tries")


def _first_of_system() -> int:
    """The first port that the system may give to any connection; 0 where that is not to be known."""
    try:
        with open(_RANGE) as file:
            return int(file.read().split()[0])
    except (OSError, ValueError):
        return 0
