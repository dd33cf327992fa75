"""train.py itself, on two hosts of this machine: what it asks, what it leaves open to others, and how it ends."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_tools import KEYS, ROOT, Run

import train as script
from mesh_transformer.cluster import host_options
from mesh_transformer.config import load_config
from mesh_transformer.errors import ConfigError
from scripts.soaking.places import below

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]


def train(run, *more):
    """The process of train.py, without an input, for two hosts of one device each."""
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(run.folder / "config.json"), "--tpu", "local"]
    command += ["--hosts", "2", "--devices-per-host", "1", *more]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


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


def test_a_new_run_without_a_terminal_and_what_others_see_of_it(straight, training_data, tmp_path, capsys):
    """C07: a run that is there is replaced where --yes says so, without a question, and kept where nothing does; and
    Ray's token lies in a file of this user alone, is on no command line, and opens loopback ports alone."""
    run = Run(tmp_path / "run", training_data, cores_per_replica=1, total_steps=40)
    shutil.copytree(straight.model_dir, run.model_dir)
    (run.model_dir / "metrics.jsonl").unlink()
    assert script.main([*run.arguments()[:2], "--tpu", "local", "--new"]) == 2
    assert "There is no terminal to ask on: pass --yes to agree" in capsys.readouterr().err
    assert run.store.latest() == 6
    first = train(run, "--new", "--yes")
    end = time.monotonic() + 240
    while run.lines_so_far() == 0 and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)  # so that nothing ends while it is looked at
    workers = [each for each in below(first.pid) if each.title.startswith("ray::Worker")]
    everything = below(first.pid)
    addresses = listening([first.pid, *(each.pid for each in everything)])
    # Not a worker's: Ray writes its processes' titles over what /proc shows of their environment.
    (head,) = (each for each in everything if "mesh_transformer.cluster.ray_head" in each.title)
    environment = Path(f"/proc/{head.pid}/environ").read_bytes().decode().split("\0")
    token_file = next(Path(line.partition("=")[2]) for line in environment if line.startswith("RAY_AUTH_TOKEN_PATH="))
    mode, token = stat.S_IMODE(token_file.stat().st_mode), token_file.read_text()
    first.send_signal(signal.SIGCONT)
    said = first.communicate(timeout=240)[0]
    assert first.returncode == 0 and "training from scratch" in said, said[-3000:]
    assert run.store.latest() == 40
    assert len(workers) == 2
    assert "RAY_AUTH_MODE=token" in environment
    assert mode == 0o600 and len(token) == 64
    assert not [each for each in everything if token in each.title]
    assert token not in said and not [line for line in environment if token in line]
    assert not token_file.exists()
    own = {socket.gethostbyname(socket.gethostname())}  # at which XLA's own collectives on CPU meet
    assert addresses and not [each for each in addresses - own if not re.match(r"127\.|::1$", each)], addresses


def test_ray_imported_too_early_is_said_at_once():
    code = "import ray; from mesh_transformer.cluster.ray_session import RaySession; RaySession().start()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "ClusterError: this process imported ray before" in done.stderr, done.stderr


def test_hosts_that_do_not_fit_the_config_are_refused_before_anything_starts():
    config = load_config(KEYS | {"name": "n", "model_dir": "m"})
    options = script.parse(["--config", "c", "--tpu", "local", "--hosts", "3", "--devices-per-host", "2"])
    with pytest.raises(ConfigError, match="cores_per_replica"):
        host_options.hosts_of(options, config)
    with pytest.raises(SystemExit):
        script.parse(["--config", "c"])
