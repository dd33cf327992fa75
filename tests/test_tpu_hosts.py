"""What a run does about a TPU that is preempted, gone, replaced, or there while its hosts are not."""

import io
import time

import pytest
from fake_tpu_api import ZONE, FakeTPU

from mesh_transformer.cluster import tpu_api, tpu_hosts, tpu_machines, tpu_nodes
from mesh_transformer.cluster.accelerators import accelerator
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.ssh import DryShell
from mesh_transformer.cluster.tpu_hosts import TPUHosts
from mesh_transformer.cluster.tpu_machines import Login

pytest.importorskip("google.auth", reason="needs google-auth")


class Machines:
    """In place of SSHHosts: what it was asked to do, and `ill`, which it answers."""

    address = "10.0.0.1"

    def __init__(self):
        self.calls, self.ill = [], None

    def check(self):
        if self.ill:
            raise HostError(self.ill)

    def restore(self):
        self.calls.append("restore")
        self.check()
        return ["restored"]

    def replace(self, machines):
        self.calls.append(("replace", [machine.inside for machine in machines]))
        return ["replaced"]

    def stop(self):
        self.calls.append("stop")


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    fake = FakeTPU()
    fake.ready_after = 1
    for name, value in {**fake.environment(tmp_path), tpu_machines.HOME_VARIABLE: str(tmp_path / "mine")}.items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.close()


@pytest.fixture
def pod(cloud):
    """(the TPU's hosts, the machines under them)"""
    api = tpu_api.connect(ZONE, None)
    api.sleep = lambda seconds: None
    kind = accelerator("v4-32")
    node = tpu_nodes.create(api, "pod", tpu_nodes.Request(kind, kind.runtime, spot=True), "nonce")
    machines = Machines()
    return TPUHosts(api, "pod", node, machines, Login(dry=True), DryShell(io.StringIO(), {}), 600, 0.0), machines


def test_a_preemption_is_seen_while_the_hosts_still_answer(cloud, pod):
    hosts, machines = pod
    hosts.check()
    cloud.preempt("pod")
    with pytest.raises(HostError, match="^TPU pod is PREEMPTED$"):
        hosts.check()
    machines.ill = "host tpu-pod-0: its Ray node does not answer"
    with pytest.raises(HostError, match="PREEMPTED"):  # the API knows better
        hosts.check()
    assert hosts.restore() == ["replaced"]
    assert machines.calls == ["stop", ("replace", cloud.hosts)]
    assert cloud.nodes["pod"]["state"] == "READY" and cloud.nodes["pod"]["schedulingConfig"] == {"spot": True}


def test_the_api_is_asked_now_and_then_and_its_silence_says_nothing(cloud, pod, monkeypatch):
    hosts, machines = pod
    monkeypatch.setattr(hosts, "_look_seconds", 1000)
    before = len(cloud.log)
    for _ in range(20):
        hosts.check()
    assert len(cloud.log) == before + 1
    monkeypatch.setattr(hosts, "_look_seconds", 0)
    cloud.refuse = [("GET", 403, "PERMISSION_DENIED", "denied")] * 3
    hosts.check()
    machines.ill = "host tpu-pod-0: gone"
    with pytest.raises(HostError, match="host tpu-pod-0: gone"):
        hosts.check()
    machines.ill = None
    assert hosts.restore() == ["restored"], "hosts can be well although the API is not"


def test_hosts_that_fail_on_a_tpu_that_is_there_do_not_cost_it(cloud, pod):
    hosts, machines = pod
    assert hosts.restore() == ["restored"]
    machines.ill = "host tpu-pod-0: its disk is full"
    with pytest.raises(HostError, match="its disk is full"):
        hosts.restore()
    assert not cloud.requests("DELETE") and len(cloud.nodes) == 1


@pytest.mark.parametrize("how", ["deleted", "made again", "on its way"])
def test_a_tpu_that_others_changed(cloud, pod, how):
    hosts, machines = pod
    if how == "on its way":
        cloud.nodes["pod"] |= {"state": "CREATING", "hosts": ["10.0.0.8", "10.0.0.9"], "looks": 0}
        cloud.ready_after = 3
    else:
        old = cloud.nodes.pop("pod")
        cloud.hosts = ["10.0.0.8", "10.0.0.9"]
        if how == "made again":
            cloud.create_node("pod", {key: old[key] for key in ("acceleratorType", "runtimeVersion", "labels")})
    assert hosts.restore() == ["replaced"]
    assert machines.calls == ["stop", ("replace", ["10.0.0.8", "10.0.0.9"])]
    assert not cloud.requests("DELETE")


def test_no_capacity_is_waited_for_and_no_permission_is_not(cloud, pod, caplog):
    hosts, _ = pod
    caplog.set_level("INFO")
    cloud.preempt("pod")
    cloud.refuse = [("POST", 429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone")] * 3
    began = time.monotonic()
    assert hosts.restore() == ["replaced"]
    assert caplog.text.count("has no such TPU free now") == 3
    cloud.preempt("pod")
    cloud.refuse = [("POST", 403, "PERMISSION_DENIED", "denied")]
    with pytest.raises(tpu_api.TPUError, match="roles/tpu.admin"):
        hosts.restore()
    assert time.monotonic() - began < 30


def test_the_size_is_checked_before_hosts_are_reached(cloud):
    api = tpu_api.connect(ZONE, None)
    api.sleep = lambda seconds: None
    cloud.create_node("pod", {"acceleratorType": "v4-16", "runtimeVersion": "x"})

    def refuse(devices):
        raise ValueError(f"{devices}")

    with pytest.raises(ValueError, match=r"\[4, 4\]"):
        tpu_hosts.from_tpu(api, "pod", None, Login(), None, None, 60, check=refuse)
