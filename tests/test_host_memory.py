"""Memory that steps free is kept for the next one, in processes that train on a CPU."""

import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from training_tools import ROOT

from mesh_transformer import host_memory

STEPS = """
import json, resource, sys
import jax, numpy as np
from mesh_transformer import CausalTransformer, host_memory, load_config, make_mesh

if sys.argv[1] == "training":
    host_memory.share_one_arena()
jax.config.update("jax_platforms", "cpu")
config = load_config({"layers": 2, "d_model": 128, "n_heads": 2, "n_vocab": 8192, "seq": 128, "per_replica_batch": 8,
                      "cores_per_replica": 1, "compute_dtype": "float32", "total_steps": 9, "train_set": "none.index"})
network = CausalTransformer(config, make_mesh(config, jax.devices()[:1]))
tokens = np.random.default_rng(0).integers(0, 8192, (1, 8, 129))
faults, losses = [], []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    losses.append(float(network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})["loss"]))
    jax.block_until_ready(network.state)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([faults[-1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, losses]))
"""


def run(kind):
    """Page faults of a third step, the most memory in KiB, and the losses."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # or one of the two would not compile
    command = [sys.executable, "-c", STEPS, kind]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told")
def test_a_step_takes_the_memory_of_the_one_before():
    faults, most, losses = run("training")
    usual_faults, usual_most, usual_losses = run("as a library")
    assert faults < usual_faults / 10, (faults, usual_faults)
    assert most < 1.1 * usual_most
    assert losses == usual_losses


def test_what_the_user_says_of_malloc_counts(monkeypatch):
    for name in [each for each in os.environ if each.startswith("MALLOC_") or each == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    assert (host_memory._mallopt() is not None) == (platform.libc_ver()[0] == "glibc")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert host_memory._mallopt() is None


def test_other_platforms_are_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory, "_shared", True)
    monkeypatch.setattr(host_memory, "_mallopt", lambda: pytest.fail("malloc is told something"))
    host_memory.keep_freed(SimpleNamespace(devices=np.array([[SimpleNamespace(platform="tpu")]])))
    monkeypatch.delenv("JAX_PLATFORMS")
    assert host_memory.is_for_cpu("cpu") and not host_memory.is_for_cpu("gpu") and not host_memory.is_for_cpu(None)
