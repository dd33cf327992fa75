"""scripts/tpu.py as people run it: against a server that speaks the Cloud TPU API, on real sshd hosts."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_tpu_api import FakeTPU
from serving_tools import LIMITS, make_model, wait_until
from ssh_tools import ssh_hosts

from mesh_transformer.cluster import tpu_machines
from scripts import tpu

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("google.auth", reason="needs google-auth")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
ZONE = ["--tpu_region", "us-central2-b"]
URL = "https://tpu.googleapis.com/v2/projects/PROJECT/locations/us-central2-b"


@pytest.fixture(scope="module")
def hosts():
    # A server there compiles as fast as one here.
    with ssh_hosts(XLA_FLAGS=os.environ.get("XLA_FLAGS", "")) as found:
        yield found


@pytest.fixture
def cloud(tmp_path, monkeypatch, hosts):
    """A zone whose TPUs are the hosts; this machine knows nothing of them yet."""
    fake = FakeTPU(hosts=[host.address for host in hosts.hosts])
    for name, value in {**fake.environment(tmp_path), tpu_machines.HOME_VARIABLE: str(tmp_path / "mine")}.items():
        monkeypatch.setenv(name, value)
    fake.ready_after = 1
    yield fake
    fake.close()


@pytest.fixture
def login(hosts):
    return ["--ssh-user", hosts.user, "--ssh-key", str(hosts.key), "--ssh-port", str(hosts.port)]


def run(*words):
    return tpu.main([*words[:1], *words[1:], *ZONE])


def known(tmp_path):
    files = list((tmp_path / "mine").glob("tpus/*/*/pod/known_hosts-*"))
    return sorted(line.split()[0] for file in files for line in file.read_text().splitlines())


def test_from_nothing_to_a_shell_and_back(cloud, login, hosts, tmp_path, capsys):
    assert run("create", "pod", "--tpu_type", "v4-16", "--spot", *login) == 0
    (body,) = [body for method, _, body in cloud.log if method == "POST" and body and "acceleratorType" in body]
    assert body["metadata"]["ssh-keys"].startswith(f"{hosts.user}:ssh-ed25519 AAAA")
    assert body["metadata"]["enable-guest-attributes"] == "TRUE"
    assert "pod is ready: 2 hosts, 127.0.0.2, 127.0.0.3\nit costs money until" in capsys.readouterr().out
    assert known(tmp_path) == ["tpu-pod-0", "tpu-pod-1"], "its first keys, at creation"
    cloud.preempt("pod")
    assert run("status", "pod") == 0
    said = capsys.readouterr().out
    assert "state: PREEMPTED" in said and "type: v4-16" in said and "spot" in said and "hosts: 2, devices: 8" in said
    first = cloud.nodes["pod"]["id"]
    assert run("create", "pod", "--tpu_type", "v4-16", *login) == 0  # made again, as it was
    assert cloud.nodes["pod"]["id"] != first and cloud.nodes["pod"]["schedulingConfig"] == {"spot": True}
    assert run("create", "pod", *login) == 0  # and left as it is
    assert run("list") == 0
    assert "pod  v4-16  READY  spot\n" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "scripts/tpu.py", "ssh", "pod", *ZONE, *login, "--worker", "1", "--", "echo $HOME"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{hosts.hosts[1].home}\n", "")
    assert run("ssh", "pod", "--worker", "7", *login) == 2
    assert "--worker 7: TPU pod has hosts 0 to 1" in capsys.readouterr().err
    assert run("delete", "pod") == 0
    assert not cloud.nodes and not known(tmp_path)
    assert run("delete", "pod") == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert run("status", "pod") == 2
    assert "there is no TPU pod in us-central2-b of a-project" in capsys.readouterr().err


def test_another_machine_in_its_place_is_not_believed(cloud, login, hosts, capsys):
    assert run("create", "pod", "--tpu_type", "v4-16", *login) == 0
    for host in hosts.hosts:
        host.new_key()
    assert run("create", "pod", *login) == 2  # it is there; its hosts show other keys
    assert "the host key is not the one in" in capsys.readouterr().err
    cloud.preempt("pod")
    assert run("create", "pod", *login) == 0, "what is made anew has new keys"


def test_keys_that_hosts_report_to_the_api_are_believed_and_no_others(cloud, login, hosts, tmp_path, capsys):
    cloud.create_node("pod", {"acceleratorType": "v4-16", "runtimeVersion": "x"})  # not from here
    assert run("create", "pod", *login) == 2
    assert "TPU pod was not made from this machine, and its host keys are not known" in capsys.readouterr().err
    wrong = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    cloud.host_keys = [[hosts.hosts[0].public_key], [wrong]]
    assert run("create", "pod", *login) == 2
    assert "host tpu-pod-1: greeting: ssh to 127.0.0.3" in capsys.readouterr().err
    next((tmp_path / "mine").glob("tpus/*/*/pod/known_hosts-*")).unlink()
    cloud.host_keys = [[host.public_key] for host in hosts.hosts]
    assert run("create", "pod", *login) == 0
    assert run("delete", "pod") == 2
    assert "was not made by this project: give --yes" in capsys.readouterr().err
    assert cloud.nodes and run("delete", "pod", "--yes") == 0 and not cloud.nodes


@pytest.mark.parametrize(
    "words, said",
    [
        (["create", "pod"], "there is no TPU pod .*give --tpu_type"),
        (["create", "pod", "--tpu_type", "v4-512"], "--tpu_type v4-512: the zone us-central2-b does not offer it"),
        (["create", "pod", "--tpu_type", "h100-8"], "TPU type 'h100-8'"),
        (["create", "Pod!", "--tpu_type", "v4-8"], "TPU name 'Pod!'"),
        (["create", "pod", "--tpu_type", "v4-8", "--ssh-key", "/none"], "--ssh-key /none does not exist: ssh-keygen"),
        (["serve", "pod", "--config", "configs/quickstart.json"], "TPU pod is gone"),
        (["serve", "pod", "--config", "none.json"], "none.json"),
    ],
)
def test_mistakes_are_one_line(cloud, capsys, monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and __import__("re").search(said, error), error
    assert not cloud.requests("POST")


@pytest.mark.parametrize(
    "words, said",
    [
        ("create pod --tpu_type v4-16 --queued --spot", [f"POST {URL}/queuedResources?", "StrictHostKeyChecking"]),
        ("list", [f"GET {URL}/nodes?pageSize=200"]),
        ("status pod", ["/nodes/pod"]),
        ("ssh pod", ["ssh -o BatchMode=no"]),
        ("delete pod", [f"DELETE {URL}/nodes/pod"]),
        (
            "serve pod --config configs/quickstart.json",
            ["device_serve.py --config", "-m pip install", "tar -xzf", "-L 127.0.0.1:5000"],
        ),
    ],
)  # fmt: skip
@needs_ray
def test_a_dry_run_shows_everything_and_does_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv(tpu_machines.HOME_VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("a command"))
    started = subprocess.Popen.__init__

    def only_git(self, command, *more, **named):
        assert command[0] == "git", command
        started(self, command, *more, **named)

    monkeypatch.setattr(subprocess.Popen, "__init__", only_git)
    assert run(*words.split(), "--dry-run") == 0
    out = capsys.readouterr().out
    assert not [text for text in said if text not in out], out
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
@needs_ray
def test_a_model_is_served_from_a_tpu(cloud, login, hosts, tmp_path, monkeypatch):
    """Code, packages, config and tokenizer go there; the port comes here; the end of this side is the server's end."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = make_model(folder)
    assert run("create", "pod", "--tpu_type", "v4-8", *login) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = "an-api-key-that-nobody-sees"
    log = (tmp_path / "log").open("w")
    command = [
        sys.executable, "scripts/tpu.py", "serve", "pod", *ZONE, *login, "--config", str(config), "--port", str(port),
        "--platform", "cpu", "--remote-python", sys.executable, "--", "--random-init", "--devices", "1", *LIMITS,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"MESH_TRANSFORMER_API_KEYS": secret}
    )
    try:
        url = f"http://127.0.0.1:{port}"

        def ready():
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(url + "/health").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, 240)
        reply = httpx.post(url + "/complete", json={"context": "def "}, timeout=60)
        assert reply.status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        reply = httpx.post(url + "/complete", json={"context": "def "}, headers=headers, timeout=60)
        assert reply.status_code == 200 and set(reply.json()) == {"completion"}
        (serving,) = hosts.hosts[0].home.glob(".mesh-transformer/r/serve-*")
        assert {file.name: file.stat().st_mode & 0o077 for file in serving.iterdir() if file.is_file()} == {
            "config.json": 0, "keys": 0, "tokenizer.json": 0
        }  # fmt: skip
        assert json.loads((serving / "config.json").read_text())["tokenizer"] == f"{serving}/tokenizer.json"
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [words for words in commands if secret.encode() in words]
        server = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.exists() and b"device_serve.py" in path.read_bytes() and str(serving).encode() in path.read_bytes()
            and b"sh" not in path.read_bytes().split(b"\0")[0][-2:]
        ]  # fmt: skip
        assert server
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in server), 30)
        assert not (serving / "keys").exists()
        assert secret not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
