"""Commands on other machines, by the system's own ssh: never a question, host keys always checked.

What is secret goes through standard input, never into a command line, which every user of a machine can read.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from mesh_transformer.cluster.hosts import HostError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 15
ALIVE_SECONDS, ALIVE_COUNT = 10, 3  # a connection that is silent for their product is given up
SSH_FAILED = 255  # ssh's own exit code, where it is not the command's
FOLDER = ".mesh-transformer"  # in the home of the user there; nothing outside it is touched


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine that ssh reaches.

    `address`: what ssh connects to; `inside`: the address that other hosts reach it by; `known_hosts`: a file of its
    own, None for the user's; `accept_new`: take the first key it shows (only for what has just been made); `folder`:
    the project's, relative to the home there; `python`: an interpreter there that has everything installed.
    """

    address: str
    inside: str
    user: str | None = None
    port: int = 22
    key: str | None = None
    known_hosts: str | None = None
    alias: str | None = None
    accept_new: bool = False
    folder: str = FOLDER
    python: str | None = None

    @property
    def name(self) -> str:
        """What messages, files and Ray's resources call it: letters, digits, `.`, `_`, `-`."""
        place = self.address if self.port == 22 else f"{self.address}-{self.port}"
        return self.alias or re.sub(r"[^\w.-]", "-", place)

    def ssh(self, *options: str) -> list[str]:
        """The command line up to the remote command."""
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": str(ALIVE_SECONDS),
            "ServerAliveCountMax": str(ALIVE_COUNT),
            "StrictHostKeyChecking": "accept-new" if self.accept_new else "yes",
            "LogLevel": "ERROR",
        }
        if self.known_hosts:
            settings |= {
                "UserKnownHostsFile": self.known_hosts,
                "GlobalKnownHostsFile": "/dev/null",
                "HashKnownHosts": "no",
            }
        if self.alias:
            settings |= {"HostKeyAlias": self.alias, "CheckHostIP": "no"}
        words = ["ssh"]
        for name, value in settings.items():
            words += ["-o", f"{name}={value}"]
        if self.key:
            words += ["-i", self.key, "-o", "IdentitiesOnly=yes"]
        return [*words, "-p", str(self.port), *options, f"{self.user}@{self.address}" if self.user else self.address]


class Shell(Protocol):
    """Runs scripts on machines. `what` names the operation in errors; `log` gets all that the script says."""

    def run(
        self, machine: Machine, script: str, what: str, *, send: bytes = b"", log: Path | None = None, seconds: float
    ) -> str:
        """What the script wrote to standard output. Raises HostError."""

    def start(self, machine: Machine, script: str, *, send: bytes = b"", log: Path) -> subprocess.Popen[bytes] | None:
        """Starts a script that runs until its standard input ends; None where nothing is really run."""


class SSH:
    """The real one."""

    def run(
        self, machine: Machine, script: str, what: str, *, send: bytes = b"", log: Path | None = None, seconds: float
    ) -> str:
        command = [*machine.ssh(), remote(script)]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, input=send, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as error:
            keep(log, error.stdout or b"", error.stderr or b"")
            raise HostError(
                f"host {machine.name}: {what} has not ended after {seconds:.0f} s{_where(log)}: is the machine "
                "overloaded, or its network down?"
            ) from error
        except FileNotFoundError as error:
            raise HostError("hosts are reached by ssh, which is not installed: install openssh-client") from error
        keep(log, done.stdout, done.stderr)
        logger.debug("%s: %s took %.1f s", machine.name, what, time.monotonic() - begin)
        if done.returncode == SSH_FAILED:
            raise HostError(connection_problem(machine, what, done.stderr.decode(errors="replace")))
        if done.returncode:
            said = (done.stdout + b"\n" + done.stderr).decode(errors="replace")
            raise HostError(
                f"host {machine.name}: {what} failed with exit code {done.returncode}: "
                f"{failing_line(said)}{_where(log)}"
            )
        return done.stdout.decode(errors="replace")

    def start(self, machine: Machine, script: str, *, send: bytes = b"", log: Path) -> subprocess.Popen[bytes] | None:
        with log.open("ab") as said:
            process = subprocess.Popen(
                [*machine.ssh(), remote(script)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        if send and process.stdin:
            process.stdin.write(send)
            process.stdin.flush()
        return process


class DryShell:
    """Shows every command and runs none. `answers`: what scripts would say, by the name of the operation."""

    def __init__(self, out: IO[str], answers: Mapping[str, str]) -> None:
        self._out, self._answers = out, answers

    def run(
        self, machine: Machine, script: str, what: str, *, send: bytes = b"", log: Path | None = None, seconds: float
    ) -> str:
        self._show(machine, script, what, send)
        return self._answers.get(what, "")

    def start(self, machine: Machine, script: str, *, send: bytes = b"", log: Path) -> subprocess.Popen[bytes] | None:
        self._show(machine, script, "running", send)
        return None

    def _show(self, machine: Machine, script: str, what: str, send: bytes) -> None:
        sent = f"  < {len(send)} bytes" if send else ""
        self._out.write(f"# {machine.name}: {what}\n{shlex.join(machine.ssh())} sh{sent}\n")
        self._out.writelines(f"    {line}\n" for line in script.strip().splitlines())


def remote(script: str) -> str:
    """A script as one word for a login shell of any kind."""
    return f"exec sh -c {shlex.quote(script)}"


def lease(command: str, last: str = ":", ending: int = 15) -> str:
    """A script that runs a command until it ends, or until this side hangs up: then it is told to end.

    `ending`: seconds after which it is killed. `last`: a shell command for when it has ended.
    """
    return f"""
exec 3<&0
{command} < /dev/null 3<&- &
P=$!
(
    cat <&3
    kill "$P"
    n=0
    while kill -0 "$P" && [ $n -lt {ending} ]; do sleep 1; n=$((n + 1)); done
    kill -9 "$P"
    {last}
) > /dev/null 2>&1 &
exec 3<&-
C=0
wait "$P" || C=$?
{last}
exit $C
"""


def keep(log: Path | None, *said: bytes) -> None:
    """Adds what a script said to a host's log."""
    if log is not None:
        with log.open("ab") as file:
            file.writelines(said)


def _where(log: Path | None) -> str:
    return f" (the whole log: {log})" if log is not None else ""


_ERROR = re.compile(r"error|fatal|failed|denied|no such|not found|cannot|no space|killed|refused|unable", re.IGNORECASE)


def speaks_of_error(line: str) -> bool:
    return bool(_ERROR.search(line))


def failing_line(said: str) -> str:
    """The line of a log that tells most about why it ended: the last that speaks of an error, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    return next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1])[:300]


def connection_problem(machine: Machine, what: str, said: str) -> str:
    """What kept ssh from getting there, and the remedy."""
    line = failing_line(said)
    where = f"host {machine.name}: {what}: ssh to {machine.address} port {machine.port}"
    file = machine.known_hosts or "~/.ssh/known_hosts"
    if "IDENTIFICATION HAS CHANGED" in said:
        return (
            f"{where}: the host key is not the one in {file}: another machine answers there, or it was set up anew; "
            f"if it was, remove its line (ssh-keygen -R {shlex.quote(key_name(machine))} -f {file}) and add the new key"
        )
    if "Host key verification failed" in said or "host key is known" in said:
        return (
            f"{where}: its host key is not in {file}: compare the key with the machine's own, then add it: ssh-keyscan "
            f"-p {machine.port} {machine.address} >> {file}"
        )
    if "Permission denied" in said:
        return f"{where}: it accepts none of the keys ({line}): check user and key, and the machine's authorized_keys"
    if re.search("timed out|No route|unreachable|refused|closed by|reset", said, re.IGNORECASE):
        return f"{where}: {line}: is the machine up, and does a firewall let port {machine.port} through?"
    return f"{where}: {line}"


def key_name(machine: Machine) -> str:
    """How a known-hosts file calls the machine."""
    if machine.alias:
        return machine.alias
    return machine.address if machine.port == 22 else f"[{machine.address}]:{machine.port}"


def address_towards(host: str) -> str:
    """This machine's address on the way to another; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise HostError(f"no way to {host} from this machine ({error}): check the name and the network") from error
