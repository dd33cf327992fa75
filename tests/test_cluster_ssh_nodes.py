"""Ray nodes on hosts that ssh reaches: real sshd processes on this machine, a real Ray session."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from serving_tools import wait_until
from ssh_tools import processes, ssh_hosts

from mesh_transformer.cluster import hosts_file
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.ray_session import JoinCommand
from mesh_transformer.cluster.ssh import SSH
from mesh_transformer.cluster.ssh_hosts import Sizes, SSHHosts, run_folder
from mesh_transformer.errors import ConfigError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


@pytest.fixture(scope="module")
def hosts():
    with ssh_hosts() as found:
        yield found


def test_a_run_lies_in_the_projects_folder_where_its_path_is_short_enough():
    assert run_folder("/home/alice/.mesh-transformer", "ab12-1") == ("/home/alice/.mesh-transformer/r/ab12-1")
    assert run_folder("/home/somebody-of-a-long-name/.mesh-transformer", "ab12-1") == "/tmp/mt-ab12-1"


def wait_for_error(hosts, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            hosts.check()
        except HostError as error:
            return str(error)
        time.sleep(0.1)
    raise AssertionError("nothing was noticed")


def in_a_process_of_its_own(work, *arguments, seconds=240):
    """Ray reads its token once in a process."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0


@pytest.mark.long
@needs_ray
def test_ray_nodes_over_ssh_join_end_and_come_back(hosts, tmp_path):
    """And the token is in no command line, log or message: what holds it is one file for this user alone."""
    file = hosts.hosts_file(f"python={sys.executable}", name="ray")
    in_a_process_of_its_own(story_of_two_nodes, file, [host.home for host in hosts.hosts], tmp_path)


def story_of_two_nodes(file, homes, logs):
    from mesh_transformer.cluster.ray_session import RaySession

    folder, sizes_seen = homes[0].parent, []
    sizes = Sizes(per_host=2, check=sizes_seen.append)
    cluster = SSHHosts(hosts_file.read(str(file)), SSH(), logs, sizes, restore_seconds=60)
    with RaySession(cluster.address) as session:
        import ray  # only now: it reads its settings when it is imported

        try:
            found = cluster.start(session)
            assert sizes_seen == [[2, 2]] and [host.devices for host in found] == [2, 2]
            names = [host.name for host in found]

            @ray.remote(num_cpus=0)
            def where():
                return os.environ["HOME"], os.environ["PYTHONPATH"].rpartition("/code/")[0]

            def found_homes():
                return ray.get([where.options(resources={f"host:{name}": 1}).remote() for name in names], timeout=60)

            expected = [(str(home), f"{home}/.mesh-transformer") for home in homes]
            assert found_homes() == expected
            cluster.check()
            tokens = [next(home.glob(".mesh-transformer/r/*/token")) for home in homes]
            assert [path.read_text() for path in tokens] == [session.token] * 2
            assert {path.stat().st_mode & 0o777 for path in tokens} == {0o600}
            assert not processes(session.token), "the token is to be seen"
            assert not [path for path in logs.iterdir() if session.token in path.read_text()]

            # All of a host's processes are killed at once: a power cut.
            victims = processes(f"RAY_AUTH_TOKEN_PATH={tokens[0].parent}/")
            assert len(victims) >= 3
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert f"host {names[0]}: " in wait_for_error(cluster)
            assert [host.name for host in cluster.restore()] == names
            cluster.check()
            assert found_homes() == expected

            # The network is cut: ssh's process here is gone, and the host ends the node by itself.
            cluster.node(names[1]).process.kill()
            assert names[1] in wait_for_error(cluster)
            assert [host.name for host in cluster.restore()] == names
            assert found_homes() == expected
        finally:
            cluster.stop()
    deadline = time.monotonic() + 20
    while left := processes(f"RAY_AUTH_TOKEN_PATH={folder}/"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not list(folder.glob("*/.mesh-transformer/r/*/token")), "the token is gone with the session"


class Session:
    """In place of Ray's: a node is a Python program, and all that were started have joined."""

    token = "0" * 64

    def __init__(self, program, joins):
        self.program, self.joins = program, joins

    def connect(self):
        pass

    def join_command(self, name, address, temp_dir):
        return JoinCommand(["-c", self.program], {})

    def wait_for(self, names, seconds):
        time.sleep(seconds)
        return set() if self.joins else set(names)

    def alive(self):
        return set()


def start_and_wait(file, logs):
    cluster = SSHHosts(hosts_file.read(str(file)), SSH(), logs, Sizes(per_host=1))
    cluster.start(Session("import time; time.sleep(1000)", joins=True))
    (logs / "started").touch()
    time.sleep(1000)


@needs_ray
def test_a_driver_that_is_killed_leaves_nothing_on_the_hosts(hosts, tmp_path):
    file = hosts.hosts_file(f"python={sys.executable}", name="killed")
    driver = multiprocessing.get_context("spawn").Process(target=start_and_wait, args=(file, tmp_path))
    driver.start()
    wait_until((tmp_path / "started").exists, 60)
    mark = f"RAY_AUTH_TOKEN_PATH={hosts.folder}/"
    assert len(processes(mark)) >= 2
    driver.kill()
    driver.join()
    wait_until(lambda: not processes(mark), 30)
    wait_until(lambda: not list(hosts.folder.glob("*/.mesh-transformer/r/*/token")), 30)


@needs_ray
@pytest.mark.parametrize("needed", [False, True])
def test_ray_starts_without_its_other_commands_or_with_them(needed):
    """`needed`: of a Ray that cannot do without one of them."""
    words = ["start", *(["--node-ip-address=127.0.0.1"] if needed else []), "--help"]
    code = f"import sys; sys.argv[1:] = {words}; from mesh_transformer.cluster import ray_start as r; "
    if needed:
        code += "r.LEFT_OUT += ('click',); "
    done = subprocess.run([sys.executable, "-c", code + "r.main()"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--block" in done.stdout, done.stderr


@needs_ray
def test_a_node_that_cannot_start_says_why(hosts, tmp_path):

    session = Session("import sys; sys.exit('Error: no room for Ray')", joins=False)
    machines = hosts_file.read(str(hosts.hosts_file(f"python={sys.executable}", name="broken")))
    cluster = SSHHosts(machines[:1], SSH(), tmp_path, Sizes(per_host=1))
    with pytest.raises(HostError, match=r"its Ray node ended with exit code 1: Error: no room for Ray \(log: "):
        cluster.start(session)
    tpu = SSHHosts(machines[:1], SSH(), tmp_path, Sizes(tpu=True))
    with pytest.raises(HostError, match="it has no TPU chips.*--runtime-version"):
        tpu.start(session)


@needs_ray
def test_sizes_are_checked_before_anything_is_installed(hosts, tmp_path):
    machines = hosts_file.read(str(hosts.hosts_file("folder=never", f"python={sys.executable}", name="sizes")))

    def refuse(devices):
        raise ConfigError(f"{sum(devices)} devices are too few")

    cluster = SSHHosts(machines, SSH(), tmp_path, Sizes(per_host=3, check=refuse))
    with pytest.raises(ConfigError, match="6 devices are too few"):
        cluster.start(None)
    assert not any((host.home / "never").exists() for host in hosts.hosts)


def test_nodes_of_machines_that_are_replaced_count_no_more(tmp_path, monkeypatch):
    """Their successors have the same names, and Ray takes seconds to notice that a node is gone."""
    (tmp_path / "hosts").write_text("127.0.0.2\n127.0.0.3\n")
    machines, given_up, made = hosts_file.read(str(tmp_path / "hosts")), [], []
    session = SimpleNamespace(give_up=given_up.extend)
    monkeypatch.setattr(SSHHosts, "_bring_up", lambda self, machines: made.append((machines, list(given_up))))
    cluster = SSHHosts(machines, SSH(), tmp_path, Sizes(per_host=1), address="127.0.0.10")
    cluster.start(session)
    cluster.stop()
    cluster.replace(machines)
    names = [machine.name for machine in machines]
    assert len(names) == 2 and made == [(machines, []), (machines, names)]
