"""Training on several hosts through Ray: the numbers of one process, and runs that survive their hosts."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from pod_tools import cluster_of, parent_of, process_of, send, when
from training_tools import KEYS, Run, equal

from mesh_transformer import load_config
from mesh_transformer.cluster import crew
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.pod import Patience
from mesh_transformer.errors import ConfigError
from mesh_transformer.training import start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]

# A host's processes add over `mp` through a ring, in another order than one process does in its memory.
ORDER = 1e-6


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2, 4) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster, training_data, tmp_path_factory):
    """Six steps on two hosts, validated and saved every second step."""
    run = Run(tmp_path_factory.mktemp("pod"), training_data, val_every=2, ckpt_every=2)
    assert cluster.train(run) == 0
    return run


def losses(run):
    names = ("train/loss", "train/last_loss", "train/learning_rate", "val/loss_v")
    return [[line.get(name, 0.0) for name in names] for line in run.lines]


def back_to(step, source, run):
    """A copy of a run as it was when `step` was its newest."""
    shutil.copytree(source.model_dir, run.model_dir)
    meta = run.model_dir / "meta.json"
    found = json.loads(meta.read_text())
    later = [each for each in found["checkpoints"] if each > step]
    for each in later:
        shutil.rmtree(run.model_dir / f"step_{each}")
    kept = {key: value for key, value in found["aux"].items() if int(key) <= step}
    meta.write_text(json.dumps(found | {"step": step, "checkpoints": found["checkpoints"][: -len(later)], "aux": kept}))


def test_two_hosts_give_the_numbers_of_one_process(straight, undisturbed):
    """T18."""
    np.testing.assert_allclose(losses(undisturbed), losses(straight), rtol=ORDER)
    assert undisturbed.store.aux(6)["train_loader"] == straight.store.aux(6)["train_loader"]
    names = {name: array.shape for name, array in straight.tensors(6).items()}
    assert {name: array.shape for name, array in undisturbed.tensors(6).items()} == names


def test_either_takes_up_the_other_s_checkpoints(cluster, straight, undisturbed, training_data, tmp_path):
    pod, alone = (Run(tmp_path / name, training_data, val_every=2, ckpt_every=2) for name in ("pod", "alone"))
    back_to(4, straight, pod)
    back_to(4, undisturbed, alone)
    assert cluster.train(pod) == 0
    assert alone() == 0
    for run in (pod, alone):
        np.testing.assert_allclose(losses(run), losses(straight), rtol=ORDER)


def test_a_run_outlives_processes_and_nodes(cluster, undisturbed, training_data, tmp_path, capsys):
    """One is killed, one frozen, and one's Ray node is killed: the same in the end, bit for bit."""
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
    thread = when(
        cluster, run,
        (1, lambda: send("SIGKILL", process_of(cluster, 1))),
        (3, lambda: send("SIGSTOP", process_of(cluster, 0))),
        (2, lambda: send("SIGKILL", parent_of(process_of(cluster, 1)))),
    )  # fmt: skip
    assert cluster.train(run) == 0
    thread.join(10)
    assert run.trace == undisturbed.trace
    assert equal(run.tensors(6), undisturbed.tensors(6))
    said = capsys.readouterr().err
    assert "local-1 (127.0.0.1): its process ended. All processes were ended; fresh ones go on from" in said
    assert "local-0 (127.0.0.1): its process does not answer for" in said
    assert "starting the Ray node of local-1 again" in said
    assert said.count("2 hosts are there again after") == 3


def test_sigterm_saves_and_a_second_call_finishes(cluster, undisturbed, training_data, tmp_path, capsys):
    """T20."""
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
    thread = when(cluster, run, (2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert cluster.train(run) == 75
    thread.join(10)
    assert run.store.latest() == len(run.lines) < 6
    assert "python train.py" in capsys.readouterr().err
    assert cluster.train(run) == 0
    assert run.trace == undisturbed.trace and equal(run.tensors(6), undisturbed.tensors(6))


def test_faults_without_progress_end_the_run(cluster, training_data, tmp_path):
    run = Run(tmp_path / "run", training_data, ckpt_every=6)
    thread = when(cluster, run, (1, lambda: send("SIGKILL", process_of(cluster, 0))))
    with pytest.raises(HostError, match=r"while training \(update .*local-0 .*its process ended.*--max-restarts is 0"):
        cluster.train(run, patience=Patience(0, 8.0))
    thread.join(10)


def test_a_host_that_freezes_in_work_without_a_deadline_is_found(cluster, monkeypatch):
    monkeypatch.setattr(crew, "SILENT_SECONDS", 4.0)
    pod = cluster.pod_for(load_config(KEYS | {"name": "n", "model_dir": "m"}))
    send("SIGSTOP", pod.crew.joined[1].pid)
    with pytest.raises(HostError, match=r"while drawing: local-1 .*its process does not answer for"):
        pod.crew.call("ping", operation="drawing")
    assert not pod.crew.alive


def test_a_run_goes_on_on_fewer_hosts(cluster, undisturbed, straight, training_data, tmp_path, capsys):
    """With twice the microbatches, so the same batch; validation takes as many sequences as there are."""
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
    back_to(4, undisturbed, run)
    assert cluster.train(run, hosts=1) == 0
    assert "per_replica_batch 1 x dp 1 = 1, times 4 gradient_accumulation_steps (the config has 2)" in (
        capsys.readouterr().err
    )
    np.testing.assert_allclose(losses(run), losses(straight), rtol=ORDER)


def test_a_batch_that_cannot_be_kept_is_refused_with_the_arithmetic():
    config = load_config(KEYS | {"name": "n", "model_dir": "m", "per_replica_batch": 3})
    with pytest.raises(ConfigError, match=r"takes 32 sequences a step, which per_replica_batch 3 x dp 4 = 12 .*2\.67"):
        start.keep_batch(config, {"sequences_per_step": 32}, 4)
    kept = start.keep_batch(config, {"sequences_per_step": 36}, 4)
    assert kept.mesh.gradient_accumulation_steps == 3
