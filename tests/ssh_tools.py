"""Real sshd processes on loopback addresses: each a host with a home of its own, and keys made for the occasion."""

import contextlib
import functools
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

_PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


@functools.cache
def sshd_program():
    """The path of sshd; installed where this user may, and else the test is skipped."""
    found = shutil.which("sshd", path=_PATHS)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # installed, and not started
        for command in ("apt-get update -qq", "apt-get install -qq -y --no-install-recommends openssh-server"):
            subprocess.run(command.split(), env=env, capture_output=True, check=False, timeout=300)
        found = shutil.which("sshd", path=_PATHS)
    if found is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    return found


def make_key(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


class Host:
    """One sshd at `address`; `home` is the HOME of what runs there."""

    def __init__(self, folder, number, address, port, authorized, **variables):
        self.address = address
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
        self.process = None
        self.start()

    def start(self):
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen([sshd_program(), "-D", "-e", "-f", str(self.config)], stderr=log)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
                return
            assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
            assert time.monotonic() < deadline, "sshd did not start"
            time.sleep(0.02)

    def stop(self):
        """Ends the listener; sessions that are open go on."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def new_key(self):
        """The machine was set up anew: it has another host key."""
        self.stop()
        for path in (self.key, self.key.with_suffix(".pub")):
            path.unlink()
        make_key(self.key)
        self.start()

    @property
    def public_key(self):
        return " ".join(self.key.with_suffix(".pub").read_text().split()[:2])


class Hosts:
    """Several hosts at one port, one user's key for all, and a known-hosts file with their keys."""

    def __init__(self, folder, addresses, **variables):
        sshd_program()
        self.folder = folder
        self.key = make_key(folder / "id")
        self.user = getpass.getuser()
        with socket.socket() as free:
            free.bind((addresses[0], 0))
            self.port = free.getsockname()[1]
        self.hosts = [
            Host(folder, str(number), address, self.port, f"{self.key}.pub", **variables)
            for number, address in enumerate(addresses)
        ]
        self.known_hosts = folder / "known_hosts"
        self.remember()

    def remember(self):
        """Writes the hosts' keys into the known-hosts file."""
        self.known_hosts.write_text("".join(f"[{host.address}]:{host.port} {host.public_key}\n" for host in self.hosts))

    def hosts_file(self, *settings, name="hosts"):
        path = self.folder / name
        path.write_text("".join(
            f"{self.user}@{host.address}:{host.port} "
            f"key={self.key} known_hosts={self.known_hosts} {' '.join(settings)}\n"
            for host in self.hosts
        ))  # fmt: skip
        return path

    def close(self):
        for host in self.hosts:
            host.stop()


@contextlib.contextmanager
def ssh_hosts(addresses=("127.0.0.2", "127.0.0.3"), **variables):
    """Loopback hosts while the block runs."""
    folder = Path(f"/tmp/mt{secrets.token_hex(2)}")
    folder.mkdir(mode=0o700)
    hosts = Hosts(folder, addresses, **variables)
    try:
        yield hosts
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)


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
