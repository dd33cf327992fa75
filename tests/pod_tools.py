"""What the tests of pods share: hosts of this machine that stay while run after run is made on them."""

import contextlib
import dataclasses
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from mesh_transformer.cluster import host_options, pod
from mesh_transformer.cluster.crew import Crew
from mesh_transformer.cluster.local_hosts import LocalHosts
from mesh_transformer.cluster.pod import Patience, Pod
from mesh_transformer.cluster.ray_session import RaySession
from mesh_transformer.command_line import log_lines
from mesh_transformer.training import session
from scripts.soaking.places import below

PATIENT = Patience(max_restarts=3, step_deadline=8.0)


class Cluster:
    """Two hosts of four devices, started once; every run has fresh processes on them."""

    def __init__(self, ray_session, hosts):
        self.session, self.hosts = ray_session, hosts
        self.pod = None

    def pod_for(self, config, patience=PATIENT, hosts=2, devices=None):
        """The first `hosts` of them; `devices`: that each simulates, in place of those that the cluster says."""
        found = self.hosts.restore()[:hosts]
        if devices is not None:
            found = [dataclasses.replace(host, devices=devices) for host in found]
        crew = Crew(found, self.hosts.check)
        crew.start()
        return Pod(self.hosts, crew, patience, config)

    def train(self, run, *, hosts=2, devices=None, **request):
        """As train.py would, without its own cluster; the exit code."""

        @contextlib.contextmanager
        def start_devices(config):
            self.pod = self.pod_for(config, PATIENT, hosts, devices)
            try:
                yield self.pod
            finally:
                self.pod.crew.end()

        run.arguments()  # writes the config
        wanted = session.Request(config=str(run.folder / "config.json"), **request)
        with log_lines():
            return session.train(wanted, start_devices, command=["train.py"], elastic=True)


class Lent:
    """The first `count` of a cluster's hosts, as `Hosts` that are there already and stay."""

    def __init__(self, cluster, count, devices):
        self.hosts, self.count, self.devices = cluster.hosts, count, devices
        self.address, self.check = cluster.hosts.address, cluster.hosts.check

    def start(self, session):
        return self.restore()

    def restore(self):
        return [dataclasses.replace(host, devices=self.devices) for host in self.hosts.restore()[: self.count]]

    def stop(self):
        pass


def lend(cluster, monkeypatch, count=2, devices=2):
    """For commands that would start hosts and a session of Ray: `count` hosts of the cluster and its session; them."""
    lent = Lent(cluster, count, devices)
    monkeypatch.setattr(pod, "RaySession", lambda address: contextlib.nullcontext(cluster.session))
    monkeypatch.setattr(host_options, "hosts_of", lambda options, config: lent)
    return lent


@contextlib.contextmanager
def cluster_of(hosts, devices):
    with RaySession() as ray_session, contextlib.ExitStack() as stack:
        made = LocalHosts(hosts, devices)
        stack.callback(made.stop)
        made.start(ray_session)
        yield Cluster(ray_session, made)
        folder = Path(ray_session.folder)
        assert folder.is_dir()
    assert not folder.exists(), "the token is gone with the session"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def when(cluster, run, *events):
    """A thread in which, for each (line, what), `what` is called once the run's processes have written that line."""

    def watch():
        seen = cluster.pod
        for line, what in events:
            end = time.monotonic() + 240
            while time.monotonic() < end:
                crew = cluster.pod.crew if cluster.pod is not None else None
                if crew not in (seen, None) and crew.alive and crew.joined and run.lines_so_far() >= line:
                    break
                time.sleep(0.01)
            seen = cluster.pod.crew
            what()

    cluster.pod = None
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def process_of(cluster, host):
    return cluster.pod.crew.joined[host].pid


def send(number, pid):
    os.kill(pid, getattr(signal, number))


def options_of(*words):
    import train

    return train.parse(list(words))


def listening(pids):
    """The addresses at which these processes take connections, but not sockets of files."""
    held = set()
    for pid in pids:
        folder = Path(f"/proc/{pid}/fd")
        try:
            held |= {os.readlink(each) for each in folder.iterdir()}
        except OSError:  # ended meanwhile
            continue
    found = set()
    for name, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                words = bytes.fromhex(fields[1].split(":")[0][:width])
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                address = socket.inet_ntop(socket.AF_INET if name == "tcp" else socket.AF_INET6, raw)
                found.add(address.removeprefix("::ffff:"))
    return found


def look_at(cluster):
    """What other users of this machine see of a session whose run goes on: its processes, the environment that they
    have from the head, the mode of the token's file, and the addresses at which they and this process listen."""
    (head,) = (each for each in below(os.getpid()) if "mesh_transformer.cluster.ray_head" in each.title)
    everything = [head, *below(head.pid)]
    # Not a worker's: Ray writes its processes' titles over what /proc shows of their environment.
    environment = Path(f"/proc/{head.pid}/environ").read_bytes().decode().split("\0")
    file = next(Path(line.partition("=")[2]) for line in environment if line.startswith("RAY_AUTH_TOKEN_PATH="))
    return SimpleNamespace(
        titles=[each.title for each in everything], environment=environment, token=cluster.session.token,
        kept=file.read_text(), mode=stat.S_IMODE(file.stat().st_mode),
        addresses=listening([os.getpid(), *(each.pid for each in everything)]),
    )  # fmt: skip
