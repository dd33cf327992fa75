"""Hosts that are reached by ssh, as a list of machines: code, packages and a Ray node on each."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_transformer.cluster import code_archive, remote_setup
from mesh_transformer.cluster.hosts import Host, HostError
from mesh_transformer.cluster.remote_setup import Ready
from mesh_transformer.cluster.ssh import (
    SSH_FAILED,
    Machine,
    Shell,
    address_towards,
    failing_line,
    lease,
    speaks_of_error,
)
from mesh_transformer.cluster.tpu_api import Pauses
from mesh_transformer.errors import ConfigError

if TYPE_CHECKING:
    from mesh_transformer.cluster.ray_session import RaySession

logger = logging.getLogger(__name__)

JOIN_SECONDS = 120.0  # from starting a host's Ray node to its being seen
RESTORE_SECONDS = 600.0  # for machines that are down to come back
END_SECONDS = 20.0
# The same after a fault: a host whose network is cut will not say that its node has ended, and what is left of that is
# killed by whatever node comes next there.
GONE_SECONDS = 1.0
TOKEN_LETTERS = 64
# Ray's sockets lie in its folder, under `session_(time)_(pid)/sockets/plasma_store`; a socket's path has 107 letters.
LONGEST_FOLDER = 107 - 64
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105  an environment variable that names a file
# Of Ray's own here: what Ray rewrites, 127.0.0.1, would be another address to hosts that are reached by loopback.
LOOPBACK_DRIVER = "127.0.0.10"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many devices hosts have. `per_host`: simulated CPU devices, None to use what is there; `per_chip`: of a TPU
    chip; `check`: raises ConfigError where the devices of all hosts, in order, do not fit the config."""

    per_host: int | None = None
    per_chip: int = 1
    tpu: bool = False
    check: Callable[[Sequence[int]], None] = lambda devices: None


class Node:
    """A host's Ray node, held by an ssh connection: when that ends, from whichever side, the node ends."""

    def __init__(self, ready: Ready, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self.ready, self.process, self.log = ready, process, log

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def hang_up(self) -> None:
        """Tells the node to end; `wait` waits for it."""
        if self.process is not None and self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass  # the other side has hung up already

    def wait(self, seconds: float = END_SECONDS) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class SSHHosts:
    """The `Hosts` of a list of machines. `address`: this machine's, as hosts reach it (default: found by routing)."""

    def __init__(
        self,
        machines: Sequence[Machine],
        shell: Shell,
        logs: Path,
        sizes: Sizes,
        *,
        address: str | None = None,
        restore_seconds: float = RESTORE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machines = list(machines)
        self._shell, self._logs, self._sizes = shell, logs, sizes
        self._restore_seconds, self._sleep, self._clock = restore_seconds, sleep, clock
        self._address = address or _driver_address(self.machines[0].inside)
        self._run, self._attempts = secrets.token_hex(2), 0
        self._session: RaySession | None = None
        self._nodes: dict[str, Node] = {}
        self._hosts: list[Host] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._address

    def start(self, session: RaySession) -> Sequence[Host]:
        self._session = session
        if stray := code_archive.untracked(code_archive.root()):
            logger.warning("git does not track %s, so hosts will not have it", ", ".join(stray[:5]))
        try:
            self._bring_up(self.machines)
        except BaseException:
            self.stop()
            raise
        return self._hosts

    def _bring_up(self, machines: Sequence[Machine]) -> None:
        """Code, packages and a Ray node on these machines; all are looked at before anything is installed."""
        code = code_archive.code()
        found = remote_setup.probe(self._shell, machines, code, self._logs)
        packages = code_archive.packages(self._accelerator(found))
        devices = [self._devices(here) for here in found]
        if len(found) == len(self.machines) and all(devices):
            self._sizes.check([count or 0 for count in devices])
        ready = remote_setup.prepare(self._shell, found, code, packages, self._logs)
        made = {here.machine.name: self._host(here.machine, count) for here, count in zip(found, devices, strict=True)}
        before = {host.name: host for host in self._hosts}
        self._hosts = [made.get(machine.name) or before[machine.name] for machine in self.machines]
        self._join(ready)

    def _devices(self, found: remote_setup.Found) -> int | None:
        """Devices of a host, None where only JAX can tell. Raises HostError for a TPU host without chips."""
        if self._sizes.per_host is not None:
            return self._sizes.per_host
        if self._sizes.tpu and not found.chips:
            raise HostError(
                f"host {found.machine.name}: it has no TPU chips (/dev/accel*, /dev/vfio/*): is its image a TPU's? See "
                "--runtime-version"
            )
        return found.chips * self._sizes.per_chip if self._sizes.tpu else found.gpus or None

    def _accelerator(self, found: Sequence[remote_setup.Found]) -> str:
        """Whose packages the hosts need. Raises ConfigError where they are not alike."""
        if self._sizes.per_host is not None:
            return "cpu"
        kinds = {here.machine.name: "tpu" if here.chips else "cuda" if here.gpus else "cpu" for here in found}
        if len(set(kinds.values())) > 1:
            each = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise ConfigError(f"the hosts are not alike: {each}; a run needs hosts of one kind")
        return "tpu" if self._sizes.tpu else next(iter(kinds.values()))

    def _host(self, machine: Machine, devices: int | None) -> Host:
        platform = "cpu" if self._sizes.per_host is not None else "tpu" if self._sizes.tpu else None
        return Host(machine.name, machine.inside, devices, platform, str(self._log(machine)))

    def _log(self, machine: Machine) -> Path:
        return self._logs / f"{machine.name}.node.log"

    def _join(self, ready: Sequence[Ready]) -> None:
        """Starts the Ray nodes, all at once, and waits until they are seen. Raises HostError."""
        session = self._the_session()
        session.connect()
        for here in ready:
            self._nodes[here.machine.name] = self._start_node(session, here)
        names, deadline = [here.machine.name for here in ready], self._clock() + JOIN_SECONDS
        while missing := session.wait_for(names, 0.5):
            ended = [name for name in missing if self._nodes[name].ended]
            if ended or self._clock() > deadline:
                raise HostError("\n".join(self._why(name) for name in ended or sorted(missing)))
        logger.info("Ray nodes of %s have joined", ", ".join(names))

    def _start_node(self, session: RaySession, ready: Ready) -> Node:
        machine = ready.machine
        self._attempts += 1
        run = run_folder(ready.folder, f"{self._run}-{self._attempts}")
        join = session.join_command(machine.name, machine.inside, run)
        environment = join.environment | {
            "PYTHONPATH": ready.code, TOKEN_PATH: f"{run}/token", "TPU_LOG_DIR": f"{run}/tpu_logs",
            "TMPDIR": f"{run}/t",
        }  # fmt: skip
        settings = [f"{name}={value}" for name, value in environment.items()]
        command = shlex.join(["env", *settings, ready.python, *join.arguments])
        script = _node_script(ready, run, run.removesuffix(str(self._attempts)), command)
        process = self._shell.start(machine, script, send=session.token.encode(), log=self._log(machine))
        return Node(ready, process, self._log(machine))

    def check(self) -> None:
        alive = self._the_session().alive()
        gone = [name for name, node in self._nodes.items() if node.ended or name not in alive]
        if gone:
            raise HostError("\n".join(self._why(name) for name in gone))

    def _why(self, name: str) -> str:
        """What is seen of a host that is not well."""
        node = self._nodes[name]
        said = node.log.read_text(errors="replace") if node.log.exists() else ""
        if not node.ended:
            return f"host {name}: its Ray node does not answer (log: {node.log})"
        code = node.process.returncode if node.process else 0
        what = "the connection to it was lost" if code == SSH_FAILED else f"its Ray node ended with exit code {code}"
        line = failing_line(said[-4000:])
        return f"host {name}: {what}{': ' + line if speaks_of_error(line) else ''} (log: {node.log})"

    def restore(self) -> Sequence[Host]:
        session = self._the_session()
        deadline, pauses = self._clock() + self._restore_seconds, Pauses(1.0, 30.0)
        while True:
            alive = session.alive()
            ill = [
                machine
                for machine in self.machines
                if machine.name not in alive or machine.name not in self._nodes or self._nodes[machine.name].ended
            ]
            if not ill:
                return self._hosts
            self._end([machine.name for machine in ill], GONE_SECONDS)
            session.give_up([machine.name for machine in ill])
            try:
                self._bring_up(ill)
            except HostError as error:
                pause = pauses.next()
                if self._clock() + pause > deadline:
                    raise
                logger.info("%s; trying again in %.0f s", str(error).splitlines()[0], pause)
                self._sleep(pause)

    def replace(self, machines: Sequence[Machine]) -> Sequence[Host]:
        """Other machines in place of all that there were; their hosts."""
        self._end(list(self._nodes))
        self._the_session().give_up([machine.name for machine in self.machines])
        self.machines = list(machines)
        self._hosts = []
        self._bring_up(self.machines)
        return self._hosts

    def stop(self) -> None:
        self._end(list(self._nodes))

    def node(self, name: str) -> Node:
        """A host's node."""
        return self._nodes[name]

    def _end(self, names: Sequence[str], seconds: float = END_SECONDS) -> None:
        """Hangs up on these hosts' nodes and waits until they have ended, so many seconds each at most."""
        with self._lock:
            nodes = [self._nodes.pop(name) for name in names if name in self._nodes]
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.wait(seconds)

    def _the_session(self) -> RaySession:
        if self._session is None:
            raise HostError("the hosts have not been started")
        return self._session


def run_folder(folder: str, name: str) -> str:
    """Where a node's files lie: in the project's folder, or in /tmp where that is too long for Ray's sockets."""
    run = f"{folder}/r/{name}"
    return run if len(run) <= LONGEST_FOLDER else f"/tmp/mt-{name}"  # made anew, with mode 0700


def _node_script(ready: Ready, run: str, earlier: str, command: str) -> str:
    """Ends what `earlier` attempts of the same driver left, takes the token from standard input, runs a node.

    A node's processes are known by their environment, which names the token's file; the newest few folders of Ray's
    logs are kept.
    """
    kill = "grep -lsz {} /proc/[0-9]*/environ | tr -dc '0-9\\n' | xargs -r kill -9"
    last = f"rm -f {shlex.quote(run)}/token; " + kill.format(shlex.quote(f"^{TOKEN_PATH}={run}/"))
    if not run.startswith(ready.folder):
        last += f"; rm -rf {shlex.quote(run)}"
    return f"""
set -eu
umask 077
F={shlex.quote(ready.folder)}
R={shlex.quote(run)}
({kill.format(shlex.quote(f"^{TOKEN_PATH}={earlier}"))}) 2> /dev/null || true
rm -f {shlex.quote(earlier)}*/token
ls -1dt "$F"/r/*/ 2> /dev/null | tail -n +6 | while read -r old; do [ -e "$old/token" ] || rm -rf "$old"; done
mkdir -p "$F/r"
mkdir "$R" "$R/t"
head -c {TOKEN_LETTERS} > "$R/token"
cd {shlex.quote(ready.code)}
set +e
{lease(command, last)}
"""


def _driver_address(towards: str) -> str:
    found = address_towards(towards)
    return LOOPBACK_DRIVER if found.startswith("127.") else found
