"""The actors of a cluster, one a host: all do the same at a time, and end together at the first sign of a fault."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mesh_transformer.cluster.hosts import Host, HostError
from mesh_transformer.cluster.ray_session import HOST
from mesh_transformer.cluster.worker import Joined, Worker, process_begun
from mesh_transformer.errors import ClusterError, MeshTransformerError

logger = logging.getLogger(__name__)

START_SECONDS = 180.0  # for the actors' processes to start and come together
PING_SECONDS = 5.0  # in which a process that runs answers, whatever its program does
SILENT_SECONDS = 30.0  # the same where nothing else looks wrong: a busy machine is given time, and asked as seldom
KILL_SECONDS = 10.0
CHECK_EVERY = 3.0  # between looks at the hosts while waiting
POLL_SECONDS = 0.5

_GROUPS = {"health": 1, "saving": 1}
_GROUP_OF = {"ping": "health", "free_port": "health", "sees": "saving", "write": "saving", "describe": "saving",
             "forget_copy": "saving"}  # fmt: skip
_LITTLE = 0.01  # of a resource


@dataclasses.dataclass(frozen=True)
class Pending:
    """Calls under way, one a host or `alone` on the first, and what they are for, to be read behind "while"."""

    refs: tuple[Any, ...]
    operation: str
    alone: bool = False


class Crew:
    """The actors on `hosts`, from `start` until the first fault or `end`. `check` raises HostError: see `Hosts`."""

    def __init__(self, hosts: Sequence[Host], check: Callable[[], None] = lambda: None) -> None:
        self.hosts = list(hosts)
        self.joined: list[Joined] = []
        self._check = check
        self._actors: list[Any] = []
        self._number = 0
        self._thread = threading.get_ident()
        self._ended = "the processes have not been started"

    def start(self) -> None:
        """Start the processes and join them to one program. Raises HostError, ClusterError and DeviceError."""
        import ray

        remote: Any = ray.remote
        made = remote(concurrency_groups=_GROUPS)(Worker)
        self._number = 0
        self._actors = [
            made.options(
                num_cpus=0, max_restarts=0, max_task_retries=0, resources={f"{HOST}{host.name}": 0.5, "tpu": 1}
            ).remote()
            for host in self.hosts
        ]
        first = self.hosts[0]
        address = first.address
        port = self.results(self._alone("free_port", address, operation="starting"), START_SECONDS)
        coordinator = f"{address}:{port}"
        count = len(self.hosts)
        refs = [
            self._call(actor, "join", coordinator, count, number, host.platform, host.devices)
            for number, (actor, host) in enumerate(zip(self._actors, self.hosts, strict=True))
        ]
        self.joined = self.results(Pending(tuple(refs), "joining the program"), START_SECONDS)
        self._compare_devices()

    @property
    def alive(self) -> bool:
        """Whether the processes have been started and not been ended."""
        return bool(self._actors)

    def _compare_devices(self) -> None:
        """Raises ClusterError where hosts differ from each other, or from what they should have."""
        for host, found in zip(self.hosts, self.joined, strict=True):
            wanted = host.devices or self.joined[0].local_devices
            if (found.local_devices, found.device_kind) != (wanted, self.joined[0].device_kind):
                raise ClusterError(
                    f"{host.name} has {found.local_devices} devices ({found.device_kind}), expected {wanted} "
                    f"({self.joined[0].device_kind}) as on {self.hosts[0].name}: all hosts must be alike"
                )

    def submit(self, method: str, *arguments: Any, operation: str, each: Sequence[Any] | None = None) -> Pending:
        """Start a call on every host; `each`: a first argument of its own for each."""
        numbered = method not in _GROUP_OF
        refs = []
        if not self._actors:
            raise HostError(self._ended)
        for at, actor in enumerate(self._actors):
            own = () if each is None else (each[at],)
            number = (self._number,) if numbered else ()
            refs.append(self._call(actor, method, *number, *own, *arguments))
        self._number += numbered
        return Pending(tuple(refs), operation)

    def call(
        self, method: str, *arguments: Any, operation: str, seconds: float | None = None,
        each: Sequence[Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """A call on every host, and what it returns on each. Raises as `results`."""
        return list(self.results(self.submit(method, *arguments, operation=operation, each=each), seconds))

    def first_alone(self) -> list[bool]:
        """For `result`: that the first host's is wanted, and no other's."""
        return [True] + [False] * (len(self.hosts) - 1)

    def first(self, method: str, *arguments: Any, operation: str) -> Any:
        """A call beside the program on the first host alone."""
        return self.results(self._alone(method, *arguments, operation=operation))

    def _alone(self, method: str, *arguments: Any, operation: str) -> Pending:
        return Pending((self._call(self._actors[0], method, *arguments),), operation, alone=True)

    @staticmethod
    def _call(actor: Any, method: str, *arguments: Any) -> Any:
        bound = getattr(actor, method)
        group = _GROUP_OF.get(method)
        return (bound.options(concurrency_group=group) if group else bound).remote(*arguments)

    def results(self, pending: Pending, seconds: float | None = None) -> Any:
        """What calls return, by host, or of the first alone. Waits `seconds` at most, None for as long as it takes.

        What a host raises for the user to correct is raised here. Anything else ends all processes and raises
        HostError; so does a host of which `check` says that it is gone.
        """
        import ray

        started = checked = asked = time.monotonic()
        waiting = list(pending.refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
            if waiting:  # one that failed may be why the others do not come
                self._look_at(done, pending)
            now = time.monotonic()
            if waiting and seconds is not None and now - started > seconds:
                self._fault(pending.operation, {}, seconds)
            if waiting and now - checked > CHECK_EVERY:
                checked, gone = now, self._gone()
                if gone is not None:
                    self._fault(pending.operation, {}, gone=gone)
            if waiting and now - asked > SILENT_SECONDS:
                # Work without a deadline, such as compiling and saving, must not wait for a frozen host for ever.
                (late, ended), asked = self._silent({}, SILENT_SECONDS), time.monotonic()
                if late or ended:
                    self._fault(pending.operation, late | ended, late=late)
        try:
            found = ray.get(list(pending.refs))  # all at once: one at a time costs a step milliseconds
        except ray.exceptions.RayError:
            self._look_at(pending.refs, pending)
            raise
        return found[0] if pending.alone else found

    def _look_at(self, done: Sequence[Any], pending: Pending) -> None:
        """Raises for what went wrong in calls that are done, as `results` does."""
        import jax
        import ray

        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                exhausted = isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(cause)
                if isinstance(cause, MeshTransformerError) or exhausted:
                    raise cause from error
                self._fault(pending.operation, {self._host_of(pending, ref): _short(cause)}, lives=True)
            except ray.exceptions.RayError as error:
                self._fault(pending.operation, {self._host_of(pending, ref): _died(error)})

    def _gone(self) -> str | None:
        """What the hosts themselves say of those that are gone; they are asked from one thread alone."""
        if threading.get_ident() == self._thread:
            try:
                self._check()
            except HostError as error:
                return str(error)
        return None

    def _host_of(self, pending: Pending, ref: Any) -> int:
        return pending.refs.index(ref) % len(self.hosts)  # a round of calls may be two behind each other

    def _fault(
        self, operation: str, seen: dict[int, str], seconds: float | None = None, gone: str | None = None,
        lives: bool = False, late: Mapping[int, str] | None = None,
    ) -> NoReturn:  # fmt: skip
        """Find out what happened, end all processes, and raise HostError.

        lives: what was seen is an error of a process that lives, so mostly one that lost another.
        late: those of `seen` that do not answer.
        """
        frozen, ended = self._silent(skip={} if lives else seen)
        frozen |= late or {}
        silent = frozen | ended
        gone = gone or self._gone()
        seen = silent if lives and (silent or gone) else seen | silent
        said = [f"{self.hosts[host].name} ({self.hosts[host].address}): {what}" for host, what in sorted(seen.items())]
        if gone is not None:
            said.append(gone)
        if not said and seconds is not None:
            said.append(f"all hosts answer, but nothing came in {seconds:.0f} s: a longer --step-deadline waits longer")
        if not self._actors:  # another thread met the fault first, and ended them
            raise HostError(self._ended)
        self._ended = f"while {operation}: {'; '.join(said)}"
        self.end(frozen=frozen, wait=gone is None)
        raise HostError(self._ended)

    def _silent(
        self, skip: Mapping[int, str], seconds: float | None = None
    ) -> tuple[dict[int, str], dict[int, str]]:  # fmt: skip
        """The hosts whose processes do not answer within `seconds` (PING_SECONDS), and those whose are gone."""
        import ray

        seconds = PING_SECONDS if seconds is None else seconds
        asked = {}
        for at, actor in enumerate(self._actors):
            if at not in skip:
                asked[self._call(actor, "ping")] = at
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        silence = f"its process does not answer for {seconds:.0f} s, so it is frozen or cut off"
        ended = {}
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                ended[asked[ref]] = _died(error)
        return {asked[ref]: silence for ref in late}, ended

    def end(self, frozen: Mapping[int, str] | None = None, wait: bool = True) -> None:
        """End all processes, whatever they do. Never raises.

        wait: until those of the hosts `frozen` have been killed. A host that is gone kills nothing; the node that
        starts there next ends what was left.
        """
        import ray

        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if not frozen or not self.joined:
            return
        # A process that is stopped takes no order from Ray; the system's own does.
        reaper: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
        refs = [
            reaper.options(resources={f"{HOST}{self.hosts[at].name}": _LITTLE}).remote(
                self.joined[at].pid, self.joined[at].begun
            )
            for at in frozen
        ]
        with contextlib.suppress(Exception):
            ray.wait(refs, num_returns=len(refs), timeout=KILL_SECONDS if wait else POLL_SECONDS)


def _kill(pid: int, begun: int | None) -> None:
    """Kill the process that had this id and began then: the order may come late, on a machine that began anew."""
    if process_begun(pid) == begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _died(error: Exception) -> str:
    """What Ray says of an actor that is gone, in few words."""
    text = " ".join(str(error).split())
    if "its node has died" in text or "node was terminated" in text or "raylet has died" in text:
        return "its Ray node is gone"
    return "its process ended" if "Actor" in type(error).__name__ else _short(error)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
