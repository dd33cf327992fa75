"""device_train.py on a real, tiny network split dp 2 x mp 4: exact resume, fine-tuning, refusals, non-finite values."""

import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import batch_of, mesh_of

import device_train
from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.checkpoint import shards
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.example import encode_varints
from mesh_transformer.data.records import RecordWriter, masked_crc
from mesh_transformer.optimizer import schedule

ROOT = Path(__file__).resolve().parent.parent
A, DP, MP, S, V = 2, 2, 4, 16, 64
PER_STEP = A * DP  # sequences
ON_CPU = ("--platform", "cpu", "--devices", str(DP * MP))
KEYS = {
    "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": V, "seq": S, "pe_rotary_dims": 4, "compute_dtype": "float32",
    "cores_per_replica": MP, "per_replica_batch": 1, "gradient_accumulation_steps": A,
    "lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 2, "anneal_steps": 6, "total_steps": 6,
    "train_set": "train.index", "val_set": {"v": "val.index"}, "val_batches": 20, "val_batch_multiplier": 2,
}  # fmt: skip


def counting(count, seed):
    """[count, S + 1]: sequences that count upwards in threes, so that there is something to learn."""
    starts = np.random.default_rng(seed).integers(0, V, count)
    return (starts[:, None] + 3 * np.arange(S + 1)) % V


def write_file(path, count, seed):
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for tokens in counting(count, seed):
            writer.write({"text": tokens})


def write_masked_file(path, count, seed, bad):
    """As `write_file`, with a mask in floats: 1, and infinity in the records `bad`, which no writer of ours makes."""

    def field(number, content):
        return bytes([number << 3 | 2]) + encode_varints(np.array([len(content)])) + content

    def feature(name, kind, content):
        return field(1, field(1, name) + field(2, field(kind, field(1, content))))

    with path.open("wb") as file:
        for number, tokens in enumerate(counting(count, seed)):
            mask = np.full(S + 1, np.inf if number in bad else 1.0, "<f4")
            example = field(1, feature(b"text", 3, encode_varints(tokens)) + feature(b"mask", 2, mask.tobytes()))
            length = struct.pack("<Q", len(example))
            file.write(length + struct.pack("<I", masked_crc(length)))
            file.write(example + struct.pack("<I", masked_crc(example)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """train.index: files of 12 (three steps exactly) and 20 records; val.index: 10 records."""
    folder = tmp_path_factory.mktemp("data")
    for name, count, seed in (("a", 12, 0), ("b", 20, 1), ("v", 10, 2)):
        write_file(folder / f"{name}.tfrecords", count, seed)
    (folder / "train.index").write_text("a.tfrecords\nb.tfrecords\n")
    (folder / "val.index").write_text("v.tfrecords\n")
    return folder


class Run:
    """A run in a folder of its own: its config, its commands, and what it left."""

    def __init__(self, folder, data_dir, **keys):
        self.folder = folder
        self.model_dir = folder / "model"
        self.keys = {**KEYS, "data_dir": str(data_dir), "model_dir": str(self.model_dir), "name": "tiny", **keys}

    def arguments(self, *more, **keys):
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.json"
        path.write_text(json.dumps(self.keys | keys))
        return ["--config", str(path), *ON_CPU, *more]

    def __call__(self, *more, **keys):
        return device_train.main(self.arguments(*more, **keys))

    @property
    def lines(self):
        return [json.loads(line) for line in (self.model_dir / "metrics.jsonl").read_text().splitlines()]

    def lines_so_far(self):
        """How many lines a run that may not have begun has written."""
        path = self.model_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def trace(self):
        """What must be the same bit for bit however the run was cut: everything but the times."""
        timed = (
            "time",
            "train/step_seconds",
            "train/steps_per_sec",
            "train/tokens_per_sec",
            "train/model_flops_per_sec",
        )
        return [{key: value for key, value in line.items() if key not in timed} for line in self.lines]

    @property
    def store(self):
        return CheckpointStore(self.model_dir)

    def tensors(self, step):
        """Every array of a saved step, by file and number."""
        folder = self.model_dir / f"step_{step}"
        found = {}
        for path in sorted(folder.glob("shard_*/*.npz")):
            with np.load(path) as arrays:
                found |= {f"{path.relative_to(folder)}/{name}": arrays[name] for name in arrays.files}
        return found

    def files(self):
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in self.model_dir.rglob("*")
        }

    def state(self, step):
        config = load_config(self.keys)
        return shards.read_step(self.model_dir / f"step_{step}", config.model, mesh_of(DP, MP))


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def interrupt_at(monkeypatch, call, number=signal.SIGTERM):
    """A signal arrives while update number `call` of this process is being dispatched."""
    real, calls = CausalTransformer.train, []

    def train(self, batch):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return real(self, batch)

    monkeypatch.setattr(CausalTransformer, "train", train)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """Six steps without a stop, validated and saved every second step."""
    run = Run(tmp_path_factory.mktemp("straight"), data, val_every=2, ckpt_every=2)
    assert run() == 0
    return run


def test_a_run_leaves_a_line_per_step_its_checkpoints_and_a_falling_loss(straight):
    assert [line["step"] for line in straight.lines] == [1, 2, 3, 4, 5, 6]
    assert straight.store.steps() == [2, 4, 6]
    assert [("val/loss_v" in line) for line in straight.lines] == [False, True] * 3
    assert straight.lines[5]["val/loss_v"] < straight.lines[1]["val/loss_v"] < np.log(V)
    assert straight.lines[-1]["sequences_processed"] == 6 * PER_STEP
    assert straight.lines[-1]["tokens_processed"] == 6 * PER_STEP * S
    assert straight.lines[-1]["val/sequences_v"] == 10, "two whole batches of 4 and half a one"
    assert {path.name for path in straight.model_dir.iterdir()} == {
        "meta.json", "metrics.jsonl", "step_2", "step_4", "step_6",
    }  # fmt: skip


def test_the_logged_rate_is_the_one_used(straight):
    rate = schedule(load_config(straight.keys).optim)
    assert [line["train/learning_rate"] for line in straight.lines] == [float(rate(n)) for n in range(6)]
    assert straight.lines[0]["train/learning_rate"] == 0.0


def test_sigterm_in_step_three_then_a_new_process_equals_the_straight_run(
    straight, data, tmp_path, monkeypatch, capsys
):
    """Step 3 ends exactly where the first record file does."""
    run = Run(tmp_path, data, val_every=2, ckpt_every=2)
    interrupt_at(monkeypatch, 3)
    assert run() == 75
    assert run.store.steps() == [2, 3]
    message = capsys.readouterr().err
    assert "interrupted by SIGTERM at step 3 of 6" in message
    assert f"to go on: python device_train.py --config {run.folder}/config.json" in message
    again = subprocess.run(
        [sys.executable, str(ROOT / "device_train.py"), *run.arguments()], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "resuming" in again.stderr and "at step 3 of 6" in again.stderr
    assert "8 cpu devices" in again.stderr and "mesh dp 2 x mp 4" in again.stderr
    assert run.trace == straight.trace
    assert equal(run.tensors(6), straight.tensors(6))
    assert run.store.aux(6) == straight.store.aux(6) | {"run": run.store.aux(6)["run"]}
    assert not equal(run.tensors(6), run.tensors(4)), "the comparison would notice a step"


def test_a_finished_run_exits_at_once_and_touches_nothing(straight, tmp_path, capsys):
    before = straight.files()
    assert straight() == 0
    assert straight(total_steps=4) == 0
    assert "there is nothing left to train" in capsys.readouterr().err
    assert straight.files() == before


def test_a_run_made_longer_or_shorter_keeps_a_schedule_that_was_a_default(straight, data, tmp_path, capsys):
    run = Run(tmp_path / "run", data, val_every=2, ckpt_every=2)
    shutil.copytree(straight.model_dir, run.model_dir)
    for key in ("warmup_steps", "anneal_steps"):
        del run.keys[key]
    before = run.files()
    assert run(total_steps=5) == 0
    assert run.files() == before
    assert run(total_steps=100, max_skipped=3, warmup_steps=3) == 2
    assert "warmup_steps was 2 in the run and is 3" in capsys.readouterr().err
    assert run(total_steps=7) == 0
    assert "keeps the schedule that it began with: anneal_steps 6" in capsys.readouterr().err.replace(
        "warmup_steps 2, ", ""
    )
    assert run.lines[-1]["train/learning_rate"] == float(schedule(load_config(straight.keys).optim)(6))


def test_restarts_spend_no_step_and_no_batch(data, tmp_path, monkeypatch):
    run = Run(tmp_path, data)
    for step in (1, 2, 4):
        assert run(total_steps=step) == 0
        state, aux = run.state(step), run.store.aux(step)
        assert int(state.step) == int(state.opt_state.schedule_count) == int(state.opt_state.count) == step
        assert aux["train_loader"]["records"] == aux["run"]["sequences"] == step * PER_STEP
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]


def test_sigterm_from_outside_saves_and_exits_75(data, tmp_path):
    run = Run(tmp_path, data)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "device_train.py"), *run.arguments(total_steps=10**6)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and run.lines_so_far() < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    reached = run.lines[-1]["step"]
    assert run.store.latest() == reached
    assert run(total_steps=reached + 1) == 0
    assert [line["step"] for line in run.lines] == list(range(1, reached + 2))


def test_fine_tuning_resets_the_schedule_and_its_resume_does_not(straight, data, tmp_path, monkeypatch, capsys):
    source = str(straight.model_dir / "step_6")
    run = Run(tmp_path, data, total_steps=4)
    interrupt_at(monkeypatch, 2)
    assert run("--tune-model-path", source) == 75
    state = run.state(2)
    assert (int(state.step), int(state.opt_state.count), int(state.opt_state.schedule_count)) == (8, 8, 2)
    assert run("--tune-model-path", source) == 0
    assert "resuming" in capsys.readouterr().err
    rate = schedule(load_config(run.keys).optim)
    assert [line["train/learning_rate"] for line in run.lines] == [float(rate(n)) for n in range(4)]
    assert run.lines[0]["train/loss"] < straight.lines[0]["train/loss"] - 1, "it began at trained weights"
    assert run.store.aux(4)["train_loader"]["records"] == 4 * PER_STEP
    # On another run's folder, and without a word about where it should go, it refuses.
    before = straight.files()
    assert straight("--tune-model-path", str(run.model_dir), total_steps=9) == 2
    assert "trained from its own start" in capsys.readouterr().err
    assert straight("--tune-model-path", source, total_steps=9) == 2
    assert "lies in model_dir" in capsys.readouterr().err
    assert straight.files() == before


def test_fresh_opt_leaves_the_moments_behind(straight, data, tmp_path):
    run = Run(tmp_path, data, total_steps=1)
    assert run("--tune-model-path", str(straight.model_dir), "--fresh-opt") == 0
    state, source = run.state(1), straight.state(6)
    assert int(state.opt_state.count) == 1 and int(source.opt_state.count) == 6
    # The first update has rate 0, so the weights are those of the source; the moments are of one gradient.
    assert all(map(np.array_equal, jax.tree.leaves(state.params), jax.tree.leaves(source.params)))
    pairs = zip(jax.tree.leaves(state.opt_state.mu), jax.tree.leaves(source.opt_state.mu), strict=True)
    assert not any(np.array_equal(a, b) for a, b in pairs)


def test_another_config_is_refused_with_the_keys_that_differ(straight, capsys):
    before = straight.files()
    assert straight(total_steps=9, lr=2e-2, seed=7) == 2
    message = capsys.readouterr().err
    assert "lr was 0.01" in message and "seed was 42" in message and "d_model" not in message
    assert straight.files() == before


def test_other_data_are_refused_unless_reset(straight, data, tmp_path, capsys):
    run = Run(tmp_path / "run", data)
    shutil.copytree(straight.model_dir, run.model_dir)
    (data / "other.index").write_text("b.tfrecords\n")
    assert run(total_steps=7, train_set="other.index") == 2
    assert "--reset-data" in capsys.readouterr().err
    assert run("--reset-data", total_steps=7, train_set="other.index") == 0
    assert run.store.aux(7)["train_loader"]["records"] == PER_STEP
    assert run.lines[-1]["sequences_processed"] == 7 * PER_STEP
    # From then on those are the run's data.
    assert run(total_steps=8, train_set="other.index") == 0


def test_new_asks_and_needs_yes_without_a_terminal(straight, data, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path / "run", data, total_steps=1)
    shutil.copytree(straight.model_dir, run.model_dir)
    (run.model_dir / "notes.txt").write_text("mine")
    (run.model_dir / "step_2" / "notes.txt").write_text("mine too")
    before = run.files()
    monkeypatch.setattr(sys, "stdin", None)
    assert run("--new") == 2
    assert "pass --yes" in capsys.readouterr().err
    assert run.files() == before
    assert run("--new", "--yes") == 0
    assert [line["step"] for line in run.lines] == [1] and run.store.steps() == [1]
    assert (run.model_dir / "notes.txt").exists() and (run.model_dir / "step_2" / "notes.txt").exists()
    assert not (run.model_dir / "step_4").exists()


def test_a_dry_run_leaves_nothing_behind(straight, data, tmp_path, capsys):
    run = Run(tmp_path / "run", data, val_every=2, trackers=["tensorboard", "wandb"])
    assert run("--dry-run") == 0
    shown = capsys.readouterr().err
    assert "one step: loss" in shown and "validation on v: loss" in shown and "nothing was written" in shown
    assert not run.model_dir.exists()
    before = straight.files()
    assert straight("--dry-run", total_steps=7) == 0
    assert straight.files() == before


def test_what_cannot_work_is_said_before_weights_are_drawn(data, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(CausalTransformer, "state", property(refuse))
    run = Run(tmp_path / "run", data)
    (tmp_path / "file").write_text("")
    for more, keys, expected in (
        (["--platform", "tpu"], {}, "platform 'tpu' was asked for, but JAX found 'cpu'"),
        ([], {"train_set": "none.index"}, "none.index"),
        ([], {"val_set": {"v": "none.index"}}, "none.index"),
        ([], {"n_vocab": 32}, "n_vocab"),
        ([], {"seq": 8}, "seq"),
        ([], {"model_dir": str(tmp_path / "file" / "model")}, "Not a directory"),
        (["--devices", "6"], {}, "6 devices cannot be split into replicas of cores_per_replica (4)"),
        ([], {"val_every": -1}, "val_every"),
        (["--version", "2"], {}, "version 2"),
        (["--tune-model-path", str(tmp_path / "none")], {}, str(tmp_path / "none")),
    ):
        assert run(*more, **keys) == 2, expected
        assert expected in capsys.readouterr().err
        assert not run.model_dir.exists()


def test_epochs_are_resolved_from_the_records(data, tmp_path, capsys):
    run = Run(tmp_path, data, epochs=1, total_steps=None)
    assert run() == 0
    assert "1 epochs of 32 sequences: total_steps 8" in capsys.readouterr().err
    assert [line["step"] for line in run.lines] == list(range(1, 9))
    assert run() == 0


def test_a_damaged_newest_checkpoint_is_passed_over_or_refused(straight, data, tmp_path, capsys):
    run = Run(tmp_path / "run", data, val_every=2, ckpt_every=2)
    shutil.copytree(straight.model_dir, run.model_dir)
    path = run.model_dir / "step_6" / "shard_1" / "3.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run("--strict", total_steps=7) == 2
    assert "shard_1/3.npz" in capsys.readouterr().err
    assert run(total_steps=7) == 0
    assert "step 4 is used instead" in capsys.readouterr().err
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4, 5, 6, 7]
    assert run.trace[4]["train/loss"] == straight.trace[4]["train/loss"]


@pytest.fixture
def poisoned(tmp_path):
    """Records with a mask; those of step 3 (numbers 8 to 11) give a loss that is not finite. And the same without."""
    folder = tmp_path / "poisoned"
    folder.mkdir()
    write_masked_file(folder / "bad.tfrecords", 40, 5, bad=range(8, 12))
    write_masked_file(folder / "worse.tfrecords", 40, 5, bad=range(8, 40))
    for name in ("bad", "worse"):
        (folder / f"{name}.index").write_text(f"{name}.tfrecords\n")
    return folder


def test_a_batch_that_is_not_finite_is_skipped_and_counted(poisoned, tmp_path, capsys):
    run = Run(tmp_path / "run", poisoned, train_set="bad.index", val_set={}, ckpt_every=1, keep_n=9, total_steps=4)
    assert run() == 0
    assert "not finite; the batch is skipped" in capsys.readouterr().err
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]
    assert [line["skipped"] for line in run.lines] == [0, 0, 1, 1]
    assert run.lines[-1]["sequences_processed"] == 5 * PER_STEP == run.store.aux(4)["train_loader"]["records"]
    state = run.state(4)
    assert int(state.step) == int(state.opt_state.schedule_count) == int(state.opt_state.count) == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    # Step 3 continued from exactly the state of step 2: replay its batch, records 12 to 15, on that state.
    config = load_config(run.keys)
    network = CausalTransformer(config, mesh_of(DP, MP))
    network.state = run.state(2)
    tokens = counting(40, 5)[12:16].reshape(A, DP, S + 1)
    network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    assert all(map(np.array_equal, jax.tree.leaves(network.state), jax.tree.leaves(run.state(3))))


def test_too_many_in_a_row_exit_3_and_name_the_last_good_checkpoint(poisoned, tmp_path, capsys):
    run = Run(tmp_path / "run", poisoned, train_set="worse.index", val_set={}, ckpt_every=1, max_skipped=3)
    assert run() == 3
    assert f"the last good checkpoint is {run.model_dir}/step_2" in capsys.readouterr().err
    assert [line["step"] for line in run.lines] == [1, 2]


def test_training_cross_entropy_is_the_validation_loss_of_the_same_batch():
    """Evaluated before the first update, and in another batch size than training's."""
    network = CausalTransformer(load_config(KEYS), mesh_of(DP, MP))
    batch = batch_of(A, DP, S, vocab=V)
    rows = {name: tokens.reshape(A * DP, S) for name, tokens in batch.items()}
    validated = np.mean(np.asarray(network.eval(rows)["all_loss"]))
    trained = network.train(batch)
    assert float(trained["cross_entropy"]) == pytest.approx(validated, rel=1e-5)
    assert float(trained["loss"]) == pytest.approx(float(trained["cross_entropy"]) + float(trained["z_loss"]), rel=1e-6)
    assert float(trained["z_loss"]) > 0
