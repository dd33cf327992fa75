"""Machines that ssh reaches, made on this one for tests: each a real sshd, with a home and keys of its own.

They are at loopback addresses; or, where the user may make network namespaces, each is in one of its own, with the
address and the processes of a machine of its own, and its network can be cut.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
START_SECONDS = 20.0


class UnavailableError(ValueError):
    """This machine or user cannot do it; says what is missing."""


@functools.cache
def sshd_program() -> str:
    """The path of sshd; installed where this user may. Raises UnavailableError."""
    found = shutil.which("sshd", path=_PATHS)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # installed, and not started
        for command in ("apt-get update -qq", "apt-get install -qq -y --no-install-recommends openssh-server"):
            subprocess.run(command.split(), env=env, capture_output=True, check=False, timeout=300)
        found = shutil.which("sshd", path=_PATHS)
    if found is None or shutil.which("ssh") is None:
        raise UnavailableError("needs sshd and ssh: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    return found


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


class Host:
    """One sshd at `address`; `home` is the HOME of what runs there. `inside`: the command that enters its namespace."""

    def __init__(
        self, folder: Path, number: str, address: str, port: int, authorized: str, inside: Sequence[str] = (),
        **variables: str,
    ) -> None:  # fmt: skip
        self.address, self.inside = address, list(inside)
        self.home = folder / number  # short: sockets lie in it, whose paths have a limit
        self.home.mkdir()
        self.folder = folder / f"sshd{number}"
        self.folder.mkdir()
        self.key = make_key(self.folder / "host_key")
        self.port = port
        names = {"HOME": self.home, **variables}
        settings = {
            "ListenAddress": f"{address}:{self.port}", "HostKey": self.key, "AuthorizedKeysFile": authorized,
            "PidFile": self.folder / "pid", "StrictModes": "no", "UsePAM": "no", "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no", "PermitRootLogin": "prohibit-password", "LogLevel": "ERROR",
            "MaxStartups": "100", "SetEnv": " ".join(f'"{name}={value}"' for name, value in names.items()),
        }  # fmt: skip
        self.config = self.folder / "sshd_config"
        self.config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [*self.inside, sshd_program(), "-D", "-e", "-f", str(self.config)]
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"sshd did not start: {(self.folder / 'sshd.log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends the listener; sessions that are open go on."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def new_key(self) -> None:
        """The machine was set up anew: it has another host key."""
        self.stop()
        for path in (self.key, self.key.with_suffix(".pub")):
            path.unlink()
        make_key(self.key)
        self.start()

    @property
    def public_key(self) -> str:
        return " ".join(self.key.with_suffix(".pub").read_text().split()[:2])


class Network:
    """One namespace for each of `count` hosts, behind a bridge of this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        self._tag = f"mt{secrets.token_hex(2)}"
        self._folder = folder
        # Of the range for measurements, which no network uses (RFC 2544).
        prefix = f"198.18.{secrets.randbelow(256)}."
        self.addresses = [f"{prefix}{number + 2}" for number in range(count)]
        self._names = [f"{self._tag}n{number}" for number in range(count)]
        self._made: list[str] = []
        _ip(f"link add {self._tag} type bridge")
        try:
            _ip(f"addr add {prefix}1/24 dev {self._tag}")
            _ip(f"link set {self._tag} up")
            for name, address in zip(self._names, self.addresses, strict=True):
                _ip(f"netns add {name}")
                self._made.append(name)
                _ip(f"link add {name}v type veth peer name eth0 netns {name}")
                _ip(f"link set {name}v master {self._tag} up")
                _ip(f"-n {name} link set lo up")
                _ip(f"-n {name} link set eth0 up")
                _ip(f"-n {name} addr add {address}/24 dev eth0")
                # The machine's own name must mean this address there: JAX's collectives on CPU meet at it.
                (folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        except UnavailableError:
            self.close()
            raise

    def inside(self, number: int) -> list[str]:
        """The command that runs another inside a host's namespace."""
        script = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
        name = self._names[number]
        return ["ip", "netns", "exec", name, "sh", "-ec", script, "sh", str(self._folder / f"{name}.hosts")]

    def cut(self, number: int) -> None:
        """From now on nothing that is sent to the host, or by it, arrives; nobody is told."""
        _ip(f"link set {self._names[number]}v down")

    def mend(self, number: int) -> None:
        _ip(f"link set {self._names[number]}v up")

    def pids(self, number: int) -> set[int]:
        """The processes of a host."""
        return {int(pid) for pid in _ip(f"netns pids {self._names[number]}").split()}

    def close(self) -> None:
        """Ends the hosts' processes, and removes all that was made."""
        for number, name in enumerate(self._names):
            if name in self._made:
                for pid in self.pids(number):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(UnavailableError):
                    _ip(f"link del {name}v")
                _ip(f"netns del {name}")
        _ip(f"link del {self._tag}")


def _ip(words: str) -> str:
    """What the command says. Raises UnavailableError."""
    try:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UnavailableError("needs the command ip: apt-get install iproute2") from error
    if done.returncode:
        raise UnavailableError(f"ip {words}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Several hosts at one port, one user's key for all, and a known-hosts file with their keys."""

    def __init__(
        self, folder: Path, addresses: Sequence[str], network: Network | None = None, **variables: str
    ) -> None:
        sshd_program()
        self.folder, self.network = folder, network
        self.key = make_key(folder / "id")
        self.user = getpass.getuser()
        with socket.socket() as free:
            free.bind((addresses[0] if network is None else "", 0))
            self.port = free.getsockname()[1]
        self.hosts = []
        for number, address in enumerate(addresses):
            inside = () if network is None else network.inside(number)
            authorized = f"{self.key}.pub"
            self.hosts.append(Host(folder, str(number), address, self.port, authorized, inside, **variables))
        self.known_hosts = folder / "known_hosts"
        self.remember()

    def remember(self) -> None:
        """Writes the hosts' keys into the known-hosts file."""
        self.known_hosts.write_text("".join(f"[{host.address}]:{host.port} {host.public_key}\n" for host in self.hosts))

    def hosts_file(self, *settings: str, name: str = "hosts") -> Path:
        path = self.folder / name
        path.write_text("".join(
            f"{self.user}@{host.address}:{host.port} "
            f"key={self.key} known_hosts={self.known_hosts} {' '.join(settings)}\n"
            for host in self.hosts
        ))  # fmt: skip
        return path

    def close(self) -> None:
        for host in self.hosts:
            host.stop()


@contextlib.contextmanager
def sshd_hosts(addresses: Sequence[str] = (), namespaces: int = 0, **variables: Any) -> Iterator[Hosts]:
    """Hosts at these addresses of this machine, or in so many namespaces, while the block runs."""
    sshd_program()
    with contextlib.ExitStack() as stack:
        folder = Path(f"/tmp/mt{secrets.token_hex(2)}")
        folder.mkdir(mode=0o700)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        network = None
        if namespaces:
            network = Network(folder, namespaces)
            stack.callback(network.close)
        hosts = Hosts(folder, network.addresses if network is not None else addresses, network, **variables)
        stack.callback(hosts.close)
        yield hosts


@functools.cache
def why_no_namespaces() -> str | None:
    """What keeps this user from hosts in namespaces of this machine, None for nothing."""
    if os.geteuid() != 0:
        return "only the superuser makes network namespaces"
    try:
        sshd_program()
        folder = Path(f"/tmp/mt{secrets.token_hex(2)}")
        folder.mkdir(mode=0o700)
        try:
            Network(folder, 1).close()
        finally:
            shutil.rmtree(folder)
    except UnavailableError as error:
        return str(error)
    return None
