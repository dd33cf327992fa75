"""The process that owns a Ray session's head: how its nodes start, and what it leaves behind."""

import importlib.util
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving_tools import wait_until
from training_tools import ROOT

from mesh_transformer.cluster import ports
from scripts.soaking.places import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]

TWO_AT_ONCE = """
import sys, threading, time
import ray.cluster_utils
from ray._private.utils import get_dashboard_dependency_error as error
from mesh_transformer.cluster import ray_head

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "aiohttp_cors":  # which Ray's dashboard wants
            time.sleep(0.5)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
ray.cluster_utils.Cluster = lambda **_: None
ray_head.Head("127.0.0.1", 0, "folder")
import ray.dashboard
found = []
threads = [threading.Thread(target=lambda: found.append(error())) for _ in range(2)]
for thread in threads:
    thread.start()
    time.sleep(0.2)
for thread in threads:
    thread.join()
print(sum(each is not None for each in found))
"""

KILLED = """
import os, signal
from mesh_transformer.cluster.ray_session import RaySession
session = RaySession()
session.start()
if CONNECT:
    session.connect()
print(session.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


NOWHERE = """
from mesh_transformer.cluster.ray_session import RaySession
from mesh_transformer.errors import ClusterError
try:
    with RaySession("192.0.2.1") as session:  # an address that no machine has (RFC 5737)
        session.connect()
except ClusterError as error:
    print(error)
"""

GONE = """
import os, signal
from scripts.soaking.places import below
from mesh_transformer.errors import ClusterError
from mesh_transformer.cluster.ray_session import RaySession
with RaySession() as session:
    session.connect()
    print(session.folder)
    (head,) = (each for each in below(os.getpid()) if "ray_head" in each.title)
    os.kill(head.pid, signal.SIGKILL)
    for _ in range(2):
        try:
            session.running_local()
        except ClusterError as error:
            print(error)
"""


def of(folder):
    """The head and nodes of a session."""
    return [each for each in processes() if str(folder) in each.title]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_nodes_that_start_at_once_agree_that_there_is_no_dashboard():
    """Or Ray would start one's agent as if there were, which ends, and the node would be there half a minute late."""
    done = run(TWO_AT_ONCE)
    assert done.stdout.strip() == "2", done.stdout + done.stderr


@pytest.mark.parametrize("connect", [False, True])
def test_nothing_is_left_of_the_session_of_a_driver_that_is_killed(connect):
    """While the head starts, and when it is up."""
    done = run(KILLED.replace("CONNECT", str(connect)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("mt-ray-")
    wait_until(lambda: not folder.exists(), 60)
    wait_until(lambda: not of(folder), 30)


def test_a_head_that_cannot_start_says_why():
    done = run(NOWHERE)
    assert done.stdout.startswith("Ray cannot start a head at 192.0.2.1: OSError: [Errno "), done.stdout + done.stderr


def test_a_head_that_is_gone_is_told_at_once_and_leaves_nothing():
    done = run(GONE)
    folder, *said = done.stdout.splitlines()
    line = r"Ray cannot tell which nodes of this machine run: the head's process has ended \(.+\): start the run again"
    assert len(said) == 2 and all(re.fullmatch(line, each) for each in said), done
    wait_until(lambda: not of(folder), 30)
    assert not Path(folder).exists()


def test_ports_are_free_and_each_is_given_once(monkeypatch):
    given = ports.free_ports("127.0.0.1", 50)
    assert len(set(given)) == 50
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_of_system = int(file.read().split()[0])
    if first_of_system - ports.FIRST >= ports.FEWEST:
        assert all(ports.FIRST <= port < first_of_system for port in given), "or any connection may take them meanwhile"
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "_first_of_system", lambda: given[0] + 1)
    monkeypatch.setattr(ports, "FIRST", given[0])
    monkeypatch.setattr(ports, "FEWEST", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", given[0]))
        with pytest.raises(OSError, match="no port is free at 127"):
            ports.free_ports("127.0.0.1", 1)
    assert ports.free_ports("127.0.0.1", 1) == given[:1]
    with pytest.raises(OSError, match="no port is free at 127"):
        ports.free_ports("127.0.0.1", 1)  # it was given
    monkeypatch.setattr(ports, "_first_of_system", lambda: 0)
    assert ports.free_ports("127.0.0.1", 1), "the system's own choice"
