"""Training and evaluation on several hosts through Ray: the numbers of one process, and runs that survive their
hosts."""

import json
import os
import re
import shutil
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import mesh_of, tokens_of
from data_tools import tokenizer_path
from evaluation_tools import ROOT, TASKS, trained
from pod_tools import cluster_of, lend, look_at, parent_of, process_of, send, when
from serving_tools import wait_until
from training_tools import KEYS, Run, S, equal, make_data

import eval_harness
import train
from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.cluster import crew
from mesh_transformer.cluster.cluster import TPUCluster
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.pod import Patience
from mesh_transformer.cluster.worker import Worker
from mesh_transformer.errors import CheckpointError, ConfigError, DataError
from mesh_transformer.training import start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]
needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `evaluation`)"
)

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


def test_fewer_hosts_take_up_the_checkpoint_of_one_process(cluster, straight, training_data, tmp_path, capsys):
    """The pod on one host less, with twice the microbatches, so the same batch; it validates as much at a time as it
    can."""
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
    back_to(4, straight, run)
    assert cluster.train(run, hosts=1) == 0
    assert "per_replica_batch 1 x dp 1 = 1, times 4 gradient_accumulation_steps (the config has 2)" in (
        capsys.readouterr().err
    )
    np.testing.assert_allclose(losses(run), losses(straight), rtol=ORDER)


def same_in_the_end(run, undisturbed):
    """Bit for bit, of a run that did not validate, which would have cost every start a compilation."""
    trained = [{name: value for name, value in line.items() if "val/" not in name} for line in undisturbed.trace]
    assert run.trace == trained
    assert equal(run.tensors(6), undisturbed.tensors(6))


def test_a_run_outlives_nodes_and_processes(cluster, undisturbed, training_data, tmp_path, monkeypatch, capfd):
    """One's Ray node is killed, and another is frozen; in between, what others see of it all."""
    restore, usual = cluster.hosts.restore, crew.SILENT_SECONDS

    def restored():  # fresh processes have the time again that they need
        monkeypatch.setattr(crew, "SILENT_SECONDS", usual)
        return restore()

    monkeypatch.setattr(cluster.hosts, "restore", restored)
    # Saved at every step, of which none begins before the save before it is done: so no fault comes behind the end.
    run, seen = Run(tmp_path / "run", training_data, val_every=0, ckpt_every=1), []

    def freeze():
        send("SIGSTOP", process_of(cluster, 0))
        seen.append(look_at(cluster))  # nothing ends meanwhile
        monkeypatch.setattr(crew, "SILENT_SECONDS", 3.0)  # a freeze while a checkpoint is written has no deadline

    thread = when(cluster, run, (2, lambda: send("SIGKILL", parent_of(process_of(cluster, 1)))), (4, freeze))
    assert cluster.train(run) == 0
    thread.join(10)
    same_in_the_end(run, undisturbed)
    said = "".join(capfd.readouterr())
    assert "starting the Ray node of local-1 again" in said
    frozen = (
        r"local-0 \(127\.0\.0\.1\): its process does not answer for .* All processes were ended; fresh ones go on from"
    )
    assert re.search(f"{frozen} step", said)
    assert said.count("2 hosts are there again after") == 2
    assert len(seen) == 1
    private(*seen, said)


def private(seen, said):
    """Ray's token lies in a file of this user alone, is on no command line, and opens loopback ports alone.

    And there is no dashboard, for which the head would wait when it starts.
    """
    assert sum(title.startswith("ray::Worker") for title in seen.titles) == 2
    assert any("raylet" in title for title in seen.titles)
    assert not [title for title in seen.titles if "dashboard.py" in title]
    assert "RAY_AUTH_MODE=token" in seen.environment
    assert seen.mode == 0o600 and len(seen.token) == 64 and seen.kept == seen.token
    assert not [text for text in (*seen.titles, *seen.environment, said) if seen.token in text]
    own = {socket.gethostbyname(socket.gethostname())}  # at which XLA's own collectives on CPU meet
    assert seen.addresses, "nothing was found"
    assert not [each for each in seen.addresses - own if not re.match(r"127\.|::1$", each)], seen.addresses


def test_sigterm_saves_and_one_process_goes_on(cluster, straight, training_data, tmp_path, capsys):
    """T20. That hosts go on from what hosts saved, the runs with faults show."""
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
    thread = when(cluster, run, (2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert cluster.train(run) == 75
    thread.join(10)
    assert run.store.latest() == len(run.lines) < 6
    assert "python train.py" in capsys.readouterr().err
    assert run() == 0
    np.testing.assert_allclose(losses(run), losses(straight), rtol=ORDER)


def test_freezes_are_found_with_and_without_a_deadline_and_too_many_faults_end_the_run(
    cluster, tmp_path, monkeypatch, caplog
):
    """What has no deadline, such as compiling, is looked at as well; what is frozen is killed at once; and
    --max-restarts counts what comes in a row."""
    pod = cluster.pod_for(load_config(KEYS | {"name": "n", "model_dir": "m"}), Patience(max_restarts=2))
    first, met = pod.crew, []
    faults = iter([("SIGSTOP", 1, None, 2.0), ("SIGSTOP", 0, 1.0, 30.0), ("SIGKILL", 0, None, 30.0)])

    def attempt():
        number, host, deadline, silent = next(faults)
        met.append(pod.crew.joined[host].pid)
        send(number, met[-1])
        with monkeypatch.context() as patched:
            patched.setattr(crew, "SILENT_SECONDS", silent)
            patched.setattr(crew, "PING_SECONDS", 2.0)
            return pod.crew.call("sees", str(tmp_path), operation="looking", seconds=deadline)

    def progress():
        """Asked for after every fault: what was frozen holds its place no longer."""
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in met), 2)

    too_many = r"while looking: local-0 .*its process ended.*fault 3 .*last new checkpoint.*--max-restarts is 2"
    try:
        with pytest.raises(HostError, match=too_many):
            pod.supervise(attempt, progress)
        assert not first.alive and not pod.crew.alive and pod.crew is not first
    finally:
        pod.crew.end(frozen={0: "", 1: ""})
    for host, restart in ((1, 1), (0, 2)):
        told = rf"local-{host} \(127.*not answer for 2 s, so it is frozen.*\(restart {restart} of 2\)"
        assert re.search(told, caplog.text)


def test_a_call_to_save_that_comes_late_writes_nothing(tmp_path):
    """As to a host whose network was cut, and is back after the driver has given the save up."""
    host, folder = Worker(), tmp_path / "step_4"
    host._copy = Mock()
    with pytest.raises(CheckpointError, match="step_4 is not marked as being written"):
        host.write(str(folder), None, 1, False, {})
    assert not folder.exists()


def test_a_batch_that_cannot_be_kept_is_refused_with_the_arithmetic():
    """T19."""
    config = load_config(KEYS | {"name": "n", "model_dir": "m", "per_replica_batch": 3})
    with pytest.raises(ConfigError, match=r"takes 32 sequences a step, which per_replica_batch 3 x dp 4 = 12 .*2\.67"):
        start.keep_batch(config, {"sequences_per_step": 32}, 4)
    kept = start.keep_batch(config, {"sequences_per_step": 36}, 4)
    assert kept.mesh.gradient_accumulation_steps == 3


def test_the_class_of_the_2021_library(cluster, tmp_path, monkeypatch):
    """TPUCluster: train, eval, generate, save, load and move, as the network of one process does them."""
    keys = {"cores_per_replica": 1, "name": "n", "model_dir": "m"}
    config = load_config(KEYS | keys)
    network = CausalTransformer(config, mesh_of(2, 1))
    tokens, rows = tokens_of(2, 2, S + 1), tokens_of(4, S + 1, seed=1)
    with TPUCluster((2, 1), 2, config, hosts=lend(cluster, monkeypatch, devices=1)) as pod:
        with pytest.raises(DataError, match=r"multiple of dp \(2\).*3 sequences cannot be split evenly"):  # T19
            pod.train(tokens_of(2, 3, S + 1))
        for _ in range(2):
            found, wanted = pod.train(tokens), network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
            np.testing.assert_allclose(found, [float(wanted["loss"]), float(wanted["last_loss"])], rtol=1e-5)
        mask = np.zeros((4, S))
        mask[:3, -2:] = 1
        pairs = {"obs": rows[:, :-1], "target": rows[:, 1:], "ctx_length": np.full(4, S)}
        out = {name: np.asarray(value) for name, value in network.eval(pairs).items()}
        assert pod.eval(rows) == pytest.approx(float(out["loss"].mean()), rel=1e-5)
        counted = pod.eval(pairs | {"eval_mask": mask})
        assert counted["total"] == 3 and len(counted["each_correct"]) == 4
        np.testing.assert_allclose(counted["mask_loss"], (out["all_loss"] * mask).sum(-1), rtol=1e-4)
        greedy = {"sampler_options": {"top_k": 1}}
        tokens_out = pod.generate(rows[:2, :S], np.array([S, 5]), 4, **greedy)
        np.testing.assert_array_equal(
            tokens_out, network.generate(rows[:2, :S], np.array([S, 5]), 4, {"top_k": 1})["tokens"]
        )
        pod.save(2, None, str(tmp_path / "m"), aux={"train_loader": {"used": []}, "more": 1}, init=True)
        with pytest.raises(CheckpointError, match="holds a run at step 2: pass overwrite=True"):
            pod.save(2, None, str(tmp_path / "m"), init=True)
        before = pod.train(tokens)
        step, aux = pod.load(None, str(tmp_path / "m"))
        assert (step, aux["more"]) == (2, 1)
        assert pod.train(tokens) == before
        pod.move()
        assert pod.eval(rows) > 0


def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts():
    with (
        pytest.raises(ConfigError, match=r"mesh_shape \(3, 1\) on 2 hosts"),
        TPUCluster((3, 1), 2, KEYS | {"cores_per_replica": 1}),
    ):
        pass


@needs_harness
def test_the_evaluation_harness_gives_the_figures_of_one_process(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # the example tasks name their data from there
    lend(cluster, monkeypatch)
    tasks = ",".join(TASKS[name] for name in ("word", "order", "line"))
    asked = ["--config", trained().config_file(2), "--tasks", tasks, "--limit", "6"]
    hosts = ["--tpu", "local", "--hosts", "2", "--devices-per-host", "2"]
    assert eval_harness.main([*asked, *hosts, "--output", str(tmp_path / "pod")]) == 0
    shown = capsys.readouterr().out
    assert eval_harness.main([*asked, "--platform", "cpu", "--devices", "4", "--output", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == shown
    pod, one = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("pod", "one"))
    assert pod["metrics"] == one["metrics"]
    assert pod["model"] == one["model"]
    answers = [(tmp_path / name / "answers.jsonl").read_text().splitlines() for name in ("pod", "one")]
    assert len(answers[0]) == len(answers[1]) > 12


@pytest.mark.long
@needs_harness
def test_tasks_in_training_are_evaluated_by_the_hosts(cluster, tmp_path, monkeypatch):
    """train.py on two hosts logs what device_train.py logs for the same steps on the same mesh."""
    monkeypatch.chdir(ROOT)
    lend(cluster, monkeypatch)
    (tmp_path / "data").mkdir()
    data = make_data(tmp_path / "data")
    lines = [{"context": "".join(chr(65 + (s + 3 * i) % 26) for i in range(4)), "word": "cat"} for s in range(3)]
    (tmp_path / "count.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = tmp_path / "count.yaml"
    text = Path(TASKS["word"]).read_text()
    task.write_text(text.replace("data/eval/python_word.jsonl", str(tmp_path / "count.jsonl")))
    keys = {"n_vocab": 320, "tokenizer": tokenizer_path(), "val_every": 0, "ckpt_every": 2, "total_steps": 2}
    keys |= {"eval_harness_tasks": [str(task)], "eval_every": 1, "cores_per_replica": 2}
    pod, one = (Run(tmp_path / name, data, devices=4, **keys) for name in ("pod", "one"))
    hosts = ["--tpu", "local", "--hosts", "2", "--devices-per-host", "2"]
    assert train.main([*pod.arguments()[:2], *hosts]) == 0
    assert one() == 0
    for name in ("python_word-v1/acc", "python_word-v1/perplexity"):
        assert [line[name] for line in pod.lines] == pytest.approx([line[name] for line in one.lines], rel=1e-5)
        assert len(pod.lines) == 2


def test_devices_of_this_machine_and_hosts_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        eval_harness.parse(["--config", "c", "--tpu", "local", "--devices", "4"])
    assert "--platform and --devices are of this machine" in capsys.readouterr().err
