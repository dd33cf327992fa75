"""What the tests of hosts by ssh share: real sshd processes of this machine, and what runs on them."""

import contextlib
from pathlib import Path

import pytest

from scripts.soaking import sshd_hosts


@contextlib.contextmanager
def ssh_hosts(addresses=("127.0.0.2", "127.0.0.3"), **more):
    """Loopback hosts, or `namespaces=N`, while the block runs; the test is skipped where there cannot be any."""
    try:
        sshd_hosts.sshd_program()
    except sshd_hosts.UnavailableError as error:
        pytest.skip(str(error))
    if more.get("namespaces") and (why := sshd_hosts.why_no_namespaces()) is not None:
        pytest.skip(why)
    with sshd_hosts.sshd_hosts(addresses, **more) as hosts:
        yield hosts


def processes(text):
    """pid: command line, of the processes whose command line or environment holds a text."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in command or text in environment:
            found[int(folder.name)] = command
    return found
