"""device_train.py on a real, tiny network split dp 2 x mp 4: exact resume, fine-tuning, non-finite values."""

import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import batch_of, mesh_of
from training_tools import (
    DP,
    KEYS,
    MP,
    PER_STEP,
    ROOT,
    A,
    Run,
    S,
    V,
    counting,
    equal,
    interrupt_at,
    write_masked_file,
)  # fmt: skip

from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.optimizer import schedule


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
    straight, training_data, tmp_path, monkeypatch, capsys
):
    """Step 3 ends exactly where the first record file does."""
    run = Run(tmp_path, training_data, val_every=2, ckpt_every=2)
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


def flip_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_finished_run_whose_last_step_is_damaged_trains_it_again(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path, training_data, val_every=2, ckpt_every=2)
    shutil.copytree(straight.model_dir, run.model_dir)
    flip_middle(run.model_dir / "step_6" / "shard_1" / "3.npz")
    before = run.files()
    assert run("--strict") == 2
    assert "shard_1/3.npz has checksum" in capsys.readouterr().err
    assert run.files() == before
    shutil.copytree(run.model_dir, tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "step_6")
    assert run("--dry-run", model_dir=str(tmp_path / "gone")) == 0
    assert "the run is at its end, but" in capsys.readouterr().err
    assert run() == 0
    said = capsys.readouterr().err
    assert "the run is at its end, but" in said and "step 4 is used instead" in said and "done: 6 of 6 steps" in said
    assert run.trace == straight.trace and equal(run.tensors(6), straight.tensors(6))


def test_what_another_trainer_did_before_the_lock_was_taken_counts(
    straight, training_data, tmp_path, monkeypatch, capsys
):
    """The folder is looked at before it is locked, and again where it has changed since."""
    run = Run(tmp_path, training_data, val_every=2, ckpt_every=2)
    hold = CheckpointStore.hold

    def late(store):
        shutil.copytree(straight.model_dir, run.model_dir, dirs_exist_ok=True)
        return hold(store)

    monkeypatch.setattr(CheckpointStore, "hold", late)
    assert run() == 0
    assert "there is nothing left to train" in capsys.readouterr().err
    assert run.trace == straight.trace and equal(run.tensors(6), straight.tensors(6))
    shutil.rmtree(run.model_dir)
    assert run(lr=3e-2) == 2, "what began there in the meantime is another run"
    assert "lr was 0.01" in capsys.readouterr().err


def test_restarts_spend_no_step_and_no_batch(training_data, tmp_path, monkeypatch):
    run = Run(tmp_path, training_data)
    for step in (1, 2, 4):
        assert run(total_steps=step) == 0
        state, aux = run.state(step), run.store.aux(step)
        assert int(state.step) == int(state.opt_state.schedule_count) == int(state.opt_state.count) == step
        assert aux["train_loader"]["records"] == aux["run"]["sequences"] == step * PER_STEP
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]


def test_sigterm_from_outside_saves_and_exits_75(training_data, tmp_path):
    run = Run(tmp_path, training_data)
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


def test_fine_tuning_resets_the_schedule_and_its_resume_does_not(
    straight, training_data, tmp_path, monkeypatch, capsys
):
    source = str(straight.model_dir / "step_6")
    run = Run(tmp_path, training_data, total_steps=4)
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


def test_fresh_opt_leaves_the_moments_behind(straight, training_data, tmp_path):
    run = Run(tmp_path, training_data, total_steps=1)
    assert run("--tune-model-path", str(straight.model_dir), "--fresh-opt") == 0
    state, source = run.state(1), straight.state(6)
    assert int(state.opt_state.count) == 1 and int(source.opt_state.count) == 6
    # The first update has rate 0, so the weights are those of the source; the moments are of one gradient.
    assert all(map(np.array_equal, jax.tree.leaves(state.params), jax.tree.leaves(source.params)))
    pairs = zip(jax.tree.leaves(state.opt_state.mu), jax.tree.leaves(source.opt_state.mu), strict=True)
    assert not any(np.array_equal(a, b) for a, b in pairs)


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
