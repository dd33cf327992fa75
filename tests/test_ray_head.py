"""The process that owns a Ray session's head: how its nodes start, and what it leaves behind."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving_tools import wait_until
from training_tools import ROOT

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
print(session.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_nodes_that_start_at_once_agree_that_there_is_no_dashboard():
    """Or Ray would start one's agent as if there were, which ends, and the node would be there half a minute late."""
    done = run(TWO_AT_ONCE)
    assert done.stdout.strip() == "2", done.stdout + done.stderr


def test_nothing_is_left_of_the_session_of_a_driver_that_is_killed():
    done = run(KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("mt-ray-")
    wait_until(lambda: not folder.exists(), 60)
