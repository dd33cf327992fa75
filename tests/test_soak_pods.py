"""Faults at random moments, then the end: the same run as if nothing had happened (scripts/soak_pods.py)."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ssh_tools import ssh_hosts

from mesh_transformer.cluster import hosts_file
from mesh_transformer.cluster.ssh import SSH
from scripts import soak_pods
from scripts.soaking import sshd_hosts

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("steps", "more", "faults"),
    [
        pytest.param(
            12, ["--least", "6", "--most", "6", "--kinds", "driver killed", "--alone"], 1, marks=pytest.mark.slow
        ),
        pytest.param(300, [], 7, marks=pytest.mark.long),
    ],
)
def test_a_pod_that_is_broken_again_and_again_ends_as_the_undisturbed_one(
    tmp_path, record_property, steps, more, faults
):
    command = [sys.executable, "scripts/soak_pods.py", "--folder", str(tmp_path), "--steps", str(steps), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = done.stdout.splitlines()[-1]
    assert result.startswith(f"passed: {steps} steps through "), result
    assert int(result.split("through ")[1].split()[0]) >= faults
    record_property("result", "\n".join(done.stdout.splitlines()))
    if faults > 1:
        why_not = sshd_hosts.why_no_namespaces()
        kinds = [kind for kind in soak_pods.KINDS if kind != soak_pods.CUT or why_not is None]
        assert not [kind for kind in kinds if f"times {kind}" not in result], result


def test_kinds_that_there_are_not_are_refused(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        soak_pods.parse(["--kinds", "earthquake"])
    assert "earthquake is unknown; there are process killed" in capsys.readouterr().err
    monkeypatch.setattr(sshd_hosts, "why_no_namespaces", lambda: "only the superuser makes network namespaces")
    assert soak_pods.CUT not in soak_pods.parse([]).kinds
    assert "network cut is left out: only the superuser makes network namespaces" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        soak_pods.parse(["--kinds", "network cut"])
    assert "nothing is left that can happen here" in capsys.readouterr().err


def reaches(address, port):
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True


def test_a_host_s_network_is_cut_and_joined_again():
    """What the soak does to a host: it has an address of its own, at which nothing arrives until it is mended."""
    with ssh_hosts(namespaces=2) as hosts:
        machines = hosts_file.read(str(hosts.hosts_file()))
        own = [SSH().run(each, "hostname -i", "asking", seconds=20).split()[0] for each in machines]
        assert own == hosts.network.addresses
        hosts.network.cut(1)
        assert [reaches(address, hosts.port) for address in own] == [True, False]
        hosts.network.mend(1)
        assert SSH().run(machines[1], "echo well", "asking", seconds=20) == "well\n"
        sessions = hosts.network.pids(1)
    assert sessions and not any(Path(f"/proc/{pid}").exists() for pid in sessions), "nothing is left"
