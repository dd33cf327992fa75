"""train.py itself: what it asks, and what it refuses before anything starts."""

import shutil
import subprocess
import sys

import pytest
from training_tools import KEYS, ROOT, Run

import train as script
from mesh_transformer.cluster import host_options
from mesh_transformer.config import load_config
from mesh_transformer.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]


def test_a_run_that_is_there_is_replaced_only_where_somebody_agrees(straight, training_data, tmp_path, capsys):
    """C07: without a terminal nobody is asked. (That --yes is enough: test_train_remote.)"""
    run = Run(tmp_path / "run", training_data, cores_per_replica=1)
    shutil.copytree(straight.model_dir, run.model_dir)
    assert script.main([*run.arguments()[:2], "--tpu", "local", "--new"]) == 2
    assert "There is no terminal to ask on: pass --yes to agree" in capsys.readouterr().err
    assert run.store.latest() == 6


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
