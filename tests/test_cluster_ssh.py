"""Hosts by ssh: real sshd processes on this machine. What is sent, where it lies, what is refused, what is said."""

import dataclasses
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from ssh_tools import ssh_hosts

from mesh_transformer.cluster import code_archive, hosts_file, remote_setup
from mesh_transformer.cluster.code_archive import Packages
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.ssh import SSH, DryShell, Machine, failing_line
from mesh_transformer.errors import ConfigError

NOTHING = Packages("", "", f"{sys.version_info.major}.{sys.version_info.minor}", imports=())
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
THIS_PYTHON = Path(sys.executable).parent


@pytest.fixture(scope="module")
def hosts():
    """Two machines without a network for pip, on which this interpreter can be found by its version."""
    path = os.pathsep.join([str(THIS_PYTHON), os.environ["PATH"]])
    with ssh_hosts(PATH=path, PIP_NO_INDEX="1") as found:
        yield found


@pytest.fixture
def machines(hosts):
    return hosts_file.read(str(hosts.hosts_file()))


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """The archive of a small repository."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "mesh_transformer").mkdir()
    (folder / "mesh_transformer/a.py").write_text("A = 1\n")
    (folder / "run.sh").write_text("echo\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "stray.py").write_text("secret = 1\n")
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "mesh_transformer", "run.sh"], check=True)
    return code_archive.code(folder)


def run(machine, script, **more):
    return SSH().run(machine, script, "a test", seconds=30, **more)


def tree(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
        if not path.relative_to(folder).parts[0] == ".mesh-transformer"
    }


def test_a_hosts_file_says_who_where_and_how(tmp_path):
    (tmp_path / "id").write_text("")
    (tmp_path / "hosts").write_text(
        f"# a comment\n\nme@10.0.0.2\n10.0.0.3:2222 key={tmp_path}/id inside=192.168.0.3 # another\n"
        "you@[fd00::1]:22 python=/opt/venv/bin/python folder=/scratch/mesh\n"
    )
    first, second, third = hosts_file.read(str(tmp_path / "hosts"))
    assert first == Machine("10.0.0.2", "10.0.0.2", "me")
    assert second == Machine("10.0.0.3", "192.168.0.3", port=2222, key=f"{tmp_path}/id")
    assert (third.address, third.user, third.python, third.folder) == (
        "fd00::1", "you", "/opt/venv/bin/python", "/scratch/mesh"
    )  # fmt: skip


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "names no host"),
        ("# nothing", "names no host"),
        ("me@host\n-oProxyCommand=evil", "line 2: '-oProxyCommand=evil' is not a host"),
        ("host prot=22", "did you mean port"),
        ("host nonsense", "expected KEY=VALUE with a key of user, port"),
        ("host port=", "expected KEY=VALUE"),
        ("host:70000", "port 70000 must be from 1 to 65535"),
        ("host key=/no/such/key", "key /no/such/key does not exist"),
        ("host\nhost", "twice"),
    ],
)
def test_a_bad_hosts_file_names_the_line(tmp_path, text, said):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=said):
        hosts_file.read(str(tmp_path / "hosts"))


def test_the_archive_is_what_git_tracks_and_the_same_each_time(code):
    with tarfile.open(fileobj=io.BytesIO(code.content)) as tar:
        assert {entry.name: oct(entry.mode) for entry in tar} == {"mesh_transformer/a.py": "0o644", "run.sh": "0o755"}
    code_archive.code.cache_clear()
    whole = code_archive.code()
    code_archive.code.cache_clear()
    again = code_archive.code()
    assert again == whole != code and again.content == whole.content and whole.files > 300


def test_the_hash_changes_with_a_file_and_without_git_the_package_is_sent(tmp_path):
    (tmp_path / "mesh_transformer").mkdir()
    (tmp_path / "mesh_transformer/a.py").write_text("A = 1\n")
    (tmp_path / "other.txt").write_text("no\n")
    before = code_archive.code(tmp_path)
    code_archive.code.cache_clear()
    (tmp_path / "mesh_transformer/a.py").write_text("A = 2\n")
    after = code_archive.code(tmp_path)
    assert before.files == after.files == 1 and before.hash != after.hash


@needs_ray
def test_packages_are_those_of_this_machine():
    jax = __import__("jax")
    cpu, tpu = code_archive.packages("cpu"), code_archive.packages("tpu")
    assert "jax[cuda13]==" in code_archive.packages("cuda").requirements
    assert f"jax=={jax.__version__}\n" in cpu.requirements and f"jax[tpu]=={jax.__version__}\n" in tpu.requirements
    assert f"jaxlib=={jax.__version__}\n" in cpu.constraints and "pytest" not in cpu.constraints
    assert cpu.hash != tpu.hash and cpu == code_archive.packages("cpu")
    assert all("==" in line for line in cpu.requirements.splitlines())


def test_set_up_in_parallel_and_at_once_the_second_time(hosts, machines, code, tmp_path):
    """And nothing but the project's own folder is touched: T21."""
    for host in hosts.hosts:
        (host.home / "mine.py").write_text("print('mine')\n")
        (host.home / "work").mkdir()
        (host.home / "work/also.py").write_text("mine too\n")
    before = [tree(host.home) for host in hosts.hosts]
    found = remote_setup.probe(SSH(), machines, code, tmp_path)
    assert [(here.has_code, len(here.environments), here.chips) for here in found] == [(False, 0, 0)] * 2
    assert not (hosts.hosts[0].home / ".mesh-transformer").exists(), "looking changes nothing"
    ready = remote_setup.prepare(SSH(), found, code, NOTHING, tmp_path)
    for host, here in zip(hosts.hosts, ready, strict=True):
        assert here.folder == f"{host.home}/.mesh-transformer"
        assert Path(here.code, "mesh_transformer/a.py").read_text() == "A = 1\n"
        assert not Path(here.code, "stray.py").exists()
        assert run(here.machine, f"{here.python} -c 'import sys; print(sys.prefix)'").strip().startswith(here.folder)
        assert Path(here.folder).stat().st_mode & 0o077 == 0
    assert [tree(host.home) for host in hosts.hosts] == before

    class NoWork(SSH):
        def run(self, machine, script, what, **more):
            assert what == remote_setup.PROBE, f"{what} on a host that has everything"
            return super().run(machine, script, what, **more)

    found = remote_setup.probe(NoWork(), machines, code, tmp_path)
    assert remote_setup.prepare(NoWork(), found, code, NOTHING, tmp_path) == ready


def test_a_set_up_that_fails_shows_the_line_and_keeps_the_log(machines, code, tmp_path):
    missing = dataclasses.replace(NOTHING, python="3.99")  # uv would bring it, which pip does not find here
    found = remote_setup.probe(SSH(), machines, code, tmp_path)
    with pytest.raises(HostError) as error:
        remote_setup.prepare(SSH(), found, code, missing, tmp_path)
    lines = str(error.value).splitlines()
    assert len(lines) == 2, lines
    for line, machine in zip(lines, machines, strict=True):
        assert line.startswith(f"host {machine.name}: installing packages failed with exit code 1: ERROR: No matching")
        assert "uv" in line
        log = Path(line.split("the whole log: ")[1].rstrip(")"))
        assert log.parent == tmp_path and "Could not find a version" in log.read_text()
    found = remote_setup.probe(SSH(), machines, code, tmp_path)
    assert not any(missing.hash in here.environments for here in found), "half a set-up does not count"


def test_a_draft_that_was_cut_off_is_not_taken_for_code(hosts, machines, code, tmp_path):
    cut = dataclasses.replace(code, hash="cut")
    cut.__dict__["content"] = code.content[:-40]
    found = remote_setup.probe(SSH(), machines[:1], cut, tmp_path)
    with pytest.raises(HostError, match="unpacking the code failed"):
        remote_setup.prepare(SSH(), found, cut, NOTHING, tmp_path)
    assert not (hosts.hosts[0].home / ".mesh-transformer/code/cut").exists()


@needs_ray
def test_a_given_interpreter_has_to_be_like_this_one(hosts, code, tmp_path):
    packages = code_archive.packages("cpu")
    same = hosts_file.read(str(hosts.hosts_file(f"python={sys.executable}", name="same")))

    def both(machines, packages):
        return remote_setup.prepare(
            SSH(), remote_setup.probe(SSH(), machines, code, tmp_path), code, packages, tmp_path
        )

    assert {here.python for here in both(same, packages)} == {sys.executable}
    assert not list(hosts.folder.glob(f"*/.mesh-transformer/env/{packages.hash}"))
    other = dataclasses.replace(packages, constraints=packages.constraints.replace("ray==", "ray==0"))
    with pytest.raises(HostError, match=r"python=.* is 3\.\d+ ray .*give one that is the same"):
        both(same, other)
    with pytest.raises(HostError, match="/no/python"):
        both([dataclasses.replace(machine, python="/no/python") for machine in same], packages)


def test_a_host_key_that_is_not_known_is_refused(machines, tmp_path):
    (tmp_path / "known").write_text("")
    stranger = dataclasses.replace(machines[0], known_hosts=str(tmp_path / "known"))
    with pytest.raises(HostError, match=f"its host key is not in {tmp_path}/known.*ssh-keyscan"):
        run(stranger, "true")
    assert (tmp_path / "known").read_text() == ""


def test_what_was_just_made_is_taken_as_it_is_and_then_held_to_it(hosts, machines, tmp_path):
    known = tmp_path / "known"
    fresh = dataclasses.replace(machines[0], known_hosts=str(known), alias="tpu-pod-0", accept_new=True)
    assert run(fresh, "echo hello") == "hello\n"
    assert known.read_text().split()[0] == "tpu-pod-0"
    held = dataclasses.replace(fresh, accept_new=False)
    assert run(held, "echo hello") == "hello\n"
    before = hosts.hosts[0].key.read_text(), hosts.hosts[0].public_key
    hosts.hosts[0].new_key()
    try:
        for machine in (held, fresh):  # accept-new takes no other key in place of a known one
            with pytest.raises(HostError, match="the host key is not the one in .*ssh-keygen -R tpu-pod-0"):
                run(machine, "true")
    finally:
        hosts.hosts[0].key.write_text(before[0])
        hosts.hosts[0].key.with_suffix(".pub").write_text(before[1])
        hosts.hosts[0].stop()
        hosts.hosts[0].start()
    assert run(held, "true") == ""


def test_errors_name_the_host_and_what_was_done(hosts, machines, tmp_path):
    with pytest.raises(HostError, match=r"host 127.0.0.2-\d+: a test failed with exit code 3: cannot do it"):
        run(machines[0], "echo 'cannot do it' >&2; echo bye; exit 3")
    with pytest.raises(HostError, match="a test has not ended after 1 s"):
        SSH().run(machines[0], "sleep 30", "a test", seconds=1)
    with pytest.raises(HostError, match="accepts none of the keys.*authorized_keys"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(tmp_path / "other")], check=True)
        run(dataclasses.replace(machines[0], key=str(tmp_path / "other")), "true")
    with pytest.raises(HostError, match="port 9: .*refused.*firewall"):
        run(dataclasses.replace(machines[0], port=9), "true")
    two = [machines[0], dataclasses.replace(machines[1], port=9)]
    with pytest.raises(HostError, match=r"^host 127.0.0.3-9: a test: ssh to"):
        remote_setup.on_all(two, lambda machine: run(machine, "true"))


def test_scripts_survive_every_quote(machines):
    script = "echo \"it's\" '$HOME' \\\\ ; cat"
    assert run(machines[0], script, send=b"sent\n") == "it's $HOME \\\nsent\n"


def test_a_dry_run_shows_commands_and_runs_none(machines, code):
    out = io.StringIO()
    shell = DryShell(out, {remote_setup.PROBE: "folder=/home/me/.mesh-transformer\n"})
    found = remote_setup.probe(shell, machines, code, Path("/nowhere"))
    remote_setup.prepare(shell, found, code, NOTHING, Path("/nowhere"))
    said = out.getvalue()
    assert said.count("BatchMode=yes") == 6 and said.count("StrictHostKeyChecking=yes") == 6
    assert f"< {len(code.content)} bytes" in said and "-m pip install" in said


@pytest.mark.parametrize(
    "said, line",
    [
        ("", "it said nothing"),
        ("one\ntwo\n\n", "two"),
        ("a\nERROR: no space left on device\nnotice: a new pip\n", "ERROR: no space left on device"),
    ],
)
def test_the_failing_line(said, line):
    assert failing_line(said) == line
