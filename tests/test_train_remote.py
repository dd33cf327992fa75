"""train.py on hosts beyond this machine: real sshd hosts, and a TPU VM's whole life, made, preempted and made again."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_tpu_api import FakeTPU
from ssh_tools import processes, ssh_hosts
from training_tools import Run

from mesh_transformer.cluster import tpu_machines
from scripts.soaking import sshd_hosts

ROOT = Path(__file__).resolve().parent.parent
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
needs_google = pytest.mark.skipif(importlib.util.find_spec("google.auth") is None, reason="needs google-auth")
pytestmark = [needs_ray, pytest.mark.slow]
STEPS, EVERY = 32, 4  # enough that a host is lost before the end, however fast steps are
KEYS = {"total_steps": STEPS, "anneal_steps": STEPS, "ckpt_every": EVERY, "val_every": 0, "cores_per_replica": 2}
TWO = ["--devices-per-host", "2"]
SECONDS = 400  # on a machine that is busy with other things, too


@pytest.fixture(scope="module")
def hosts():
    """Two machines, where possible with a network of their own that can be cut."""
    apart = {} if sshd_hosts.why_no_namespaces() is not None else {"namespaces": 2}
    # Programs there are optimized as those of this process, which they are compared with.
    with ssh_hosts(**apart, XLA_FLAGS=os.environ.get("XLA_FLAGS", "")) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(training_data, tmp_path_factory):
    """The same run on 4 simulated devices of this machine, without Ray."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), training_data, devices=4, **KEYS)
    assert run() == 0
    return run


class Driver:
    """train.py in a process of its own, with standard input closed."""

    def __init__(self, run, *words, **environment):
        self.run, self.log = run, run.folder / "driver.log"
        config = run.arguments()[1]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "train.py", "--config", config, *TWO, *words],
                cwd=ROOT, stdout=log, stderr=log, env=os.environ | environment,
            )  # fmt: skip

    @property
    def said(self):
        return self.log.read_text()

    def until(self, condition, what):
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.said}"
            time.sleep(0.05)

    def until_step(self, step):
        self.until(lambda: self.run.lines_so_far() >= step, f"reached step {step}")

    def wait(self):
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end:\n{self.said}")
        assert code == 0, self.said

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


def losses(run):
    """By step, the last time that it was done."""
    return {line["step"]: line["train/loss"] for line in run.lines if "train/loss" in line}


def already_there(run, source):
    """A finished run lies where this one is to go."""
    run.folder.mkdir()
    shutil.copytree(source.model_dir, run.model_dir)
    (run.model_dir / "metrics.jsonl").unlink()


def compare(run, undisturbed):
    assert set(losses(run)) == set(range(1, STEPS + 1))
    assert losses(run) == losses(undisturbed), "to the last bit: between hosts only sums of two numbers are taken"
    assert (run.model_dir / f"step_{STEPS}").is_dir()


def end_host(host):
    """Everything that runs for a host ends at once, and nobody is told: a power cut."""
    victims = processes(f"RAY_AUTH_TOKEN_PATH={host.home}/")
    assert victims
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.long
def test_a_hosts_file_trains_and_survives_the_loss_of_a_host(hosts, undisturbed, training_data, tmp_path):
    """C07, too: --new --yes asks nothing, and replaces a run that is there."""
    run = Run(tmp_path / "run", training_data, **KEYS)
    already_there(run, undisturbed)
    file = hosts.hosts_file(f"python={sys.executable}")
    driver = Driver(run, "--hosts-file", str(file), "--new", "--yes", MESH_TRANSFORMER_HOME=str(tmp_path / "mine"))
    try:
        driver.until_step(3)
        hosts.hosts[1].stop()  # its sshd, too: the machine is down for a while
        end_host(hosts.hosts[1])
        driver.until(lambda: "trying again in" in driver.said, "tried again")
        hosts.hosts[1].start()
        driver.wait()
    finally:
        driver.close()
    assert f"{hosts.hosts[1].address}-{hosts.port}" in driver.said and "restart 1 of" in driver.said, driver.said
    compare(run, undisturbed)
    assert not processes(f"RAY_AUTH_TOKEN_PATH={hosts.folder}/"), "everything has ended on the hosts"


@needs_google
@pytest.mark.parametrize("loses_a_host", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_tpu_is_made_trains_is_preempted_and_made_again(hosts, undisturbed, training_data, tmp_path, loses_a_host):
    """C07, too: --new --yes asks nothing, and replaces a run that is there, once.

    loses_a_host: before the preemption, whose network is cut, where namespaces can be made; else its processes end.
    And there is no capacity at first, when the TPU is made again."""
    cloud = FakeTPU(hosts=[host.address for host in hosts.hosts])
    if not loses_a_host:
        cloud.ready_after = 1  # waiting has tests of its own
    gone = []

    def power_off(node):
        """What a preempted machine's processes do; the next one of its name has other host keys."""
        gone.append(node["id"])
        for host in hosts.hosts:
            host.new_key()

    cloud.on_delete = power_off
    run = Run(tmp_path / "run", training_data, **KEYS, tpu_size=4)
    already_there(run, undisturbed)
    restarted = "go on from step"
    environment = cloud.environment(tmp_path) | {tpu_machines.HOME_VARIABLE: str(tmp_path / "mine")}
    driver = Driver(
        run, "--new", "--yes", "--tpu", "pod", "--tpu_region", "us-central2-b", "--tpu_type", "v4-16", "--spot",
        "--ssh-user", hosts.user, "--ssh-key", str(hosts.key), "--ssh-port", str(hosts.port),
        "--remote-python", sys.executable, **environment,
    )  # fmt: skip
    try:
        driver.until_step(3)
        tokens = [path.read_text() for host in hosts.hosts for path in host.home.glob(".mesh-transformer/r/*/token")]
        assert len(tokens) == 2 and len(tokens[0]) == 64 and tokens[0] == tokens[1]
        assert not processes(tokens[0]), "the token is on a command line, or in an environment"
        driver.until(lambda: "saved " in driver.said, "saved a step")  # or it would begin anew
        if loses_a_host:
            if hosts.network is not None:
                hosts.network.cut(0)
            else:
                end_host(hosts.hosts[0])
            driver.until(lambda: driver.said.count(restarted) == 1, "noticed a lost host")
            if hosts.network is not None:
                hosts.network.mend(0)
            driver.until(lambda: driver.said.count("first step done") == 2, "went on")
        driver.until_step(5)
        if loses_a_host:  # else: asking again has tests of its own
            cloud.refuse = [("POST", 429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone")]
        cloud.preempt("pod")
        for host in hosts.hosts:
            end_host(host)
        driver.wait()
    finally:
        driver.close()
        cloud.close()
        hosts.remember()
    assert "TPU pod is PREEMPTED" in driver.said, driver.said
    assert ("has no such TPU free now" in driver.said) == loses_a_host
    assert driver.said.count(restarted) == 1 + loses_a_host, driver.said
    assert len(gone) == 1 and cloud.nodes["pod"]["id"] != gone[0] and cloud.nodes["pod"]["state"] == "READY"
    assert cloud.nodes["pod"]["schedulingConfig"] == {"spot": True}
    assert "training from scratch" in driver.said
    compare(run, undisturbed)
    said = driver.said + "".join(path.read_text() for path in (tmp_path / "mine").rglob("*.log"))
    assert cloud.tokens and not [token for token in (*cloud.tokens, tokens[0]) if token in said]


def test_what_does_not_fit_is_refused_before_anything_is_made(hosts, training_data, tmp_path, monkeypatch, capsys):
    import train

    cloud = FakeTPU(hosts=[host.address for host in hosts.hosts])
    for name, value in cloud.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(tpu_machines.HOME_VARIABLE, str(tmp_path / "mine"))
    run = Run(tmp_path / "run", training_data, **KEYS, tpu_size=32)
    try:
        words = ["--config", run.arguments()[1], "--tpu", "pod", "--tpu_region", "us-central2-b"]
        assert train.main([*words, "--tpu_type", "v4-32"]) == 2
        assert "tpu_size is 32 in the config, and these hosts have 16 devices" in capsys.readouterr().err
        assert not cloud.requests("POST")
        assert train.main(words) == 2
        assert "there is no TPU pod in us-central2-b" in capsys.readouterr().err
        assert train.main(words[:4]) == 2
        assert "--tpu pod needs --tpu_region ZONE" in capsys.readouterr().err
        file = hosts.hosts_file(f"python={sys.executable}", "folder=never")
        words = ["--config", run.arguments()[1], "--hosts-file", str(file), "--devices-per-host", "2"]
        assert train.main(words) == 2
        assert "these hosts have 4 devices" in capsys.readouterr().err
        assert not any((host.home / "never").exists() for host in hosts.hosts)
    finally:
        cloud.close()


def test_a_dry_run_of_training_shows_it_all(hosts, training_data, tmp_path, capsys, monkeypatch):
    import train

    monkeypatch.setenv(tpu_machines.HOME_VARIABLE, str(tmp_path / "mine"))
    run = Run(tmp_path / "run", training_data, **KEYS)
    words = ["--config", run.arguments()[1], "--tpu", "pod", "--tpu_region", "us-central2-b", "--tpu_type", "v4-16"]
    assert train.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    for text in (
        "POST https://tpu.googleapis.com",
        "tar -xzf",
        "-m pip install",
        "mesh_transformer.cluster.ray_start start",
    ):
        assert text in said, text
    assert not (tmp_path / "mine").exists() and not run.model_dir.exists()
    assert json.dumps("v4-16") in said
