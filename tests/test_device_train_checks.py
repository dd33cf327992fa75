"""device_train.py's checks: what it refuses and when, dry runs, --new, epochs, damaged checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from training_tools import PER_STEP, ROOT, Run, S, interrupt_at, make_data, straight_run, write_file

from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data import sidecar
from mesh_transformer.data.tokenizer import train_tokenizer
from mesh_transformer.errors import StorageError
from mesh_transformer.optimizer import schedule
from mesh_transformer.training import local, trackers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    return straight_run(tmp_path_factory.mktemp("straight"), data)


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
    position = run.store.aux(7)["train_loader"]
    assert (position["records"], position["epoch_records"]) == (7 * PER_STEP, PER_STEP)
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
    with open(os.openpty()[1]) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        for answer in ("n", "", EOFError()):
            monkeypatch.setattr("builtins.input", Mock(side_effect=[answer]))
            assert run("--new") == 2
            assert "was not agreed to" in capsys.readouterr().err
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


def test_a_config_that_cannot_be_trained_is_refused_before_devices_start(data, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("devices were started")

    monkeypatch.setattr(local, "choose_platform", refuse)
    run = Run(tmp_path / "run", data, epochs=1, total_steps=None)
    assert run(early_cast=True, bf16_optimizer=True) == 2
    message = capsys.readouterr().err
    assert "early_cast cannot be used in training" in message and "bf16_optimizer cannot" in message
    assert run("--version", "2") == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(trackers=["wandb"]) == 2
    assert "trackers has wandb, which needs the package wandb" in capsys.readouterr().err


def test_data_of_another_tokenizer_are_refused_even_after_a_reset(straight, data, tmp_path, capsys):
    run = Run(tmp_path / "run", data)
    for name, hash_ in (("one", "1" * 32), ("two", "2" * 32)):
        path = data / f"{name}.tfrecords"
        write_file(path, 12, 3)
        sidecar.write(str(path), {"bytes": path.stat().st_size, "records": 12, "seq": S, "tokenizer_hash": hash_})
        (data / f"{name}.index").write_text(f"{name}.tfrecords\n")
    assert run(total_steps=1, train_set="one.index") == 0
    assert run("--reset-data", total_steps=2, train_set="two.index") == 2
    assert f"tokenizer_hash was '{'1' * 32}' in the run and is '{'2' * 32}'" in capsys.readouterr().err
    # Data that do not tell their tokenizer are compared by nothing.
    assert run("--reset-data", total_steps=2) == 0


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


def test_the_command_to_go_on_neither_deletes_the_run_nor_begins_the_data_again(
    straight, data, tmp_path, capsys, monkeypatch
):
    run = Run(tmp_path / "run", data)
    shutil.copytree(straight.model_dir, run.model_dir)
    interrupt_at(monkeypatch, 1)
    assert run("--reset-data", total_steps=9) == 75
    assert "--reset-data" not in capsys.readouterr().err.partition("to go on: ")[2]
    # Nor does an option that is cut short slip through: none is understood.
    with pytest.raises(SystemExit, match="2"):
        run("--ne", "--yes")
    assert run.store.steps() == [4, 6, 7]


def test_what_closing_a_tracker_meets_does_not_hide_why_the_run_ended(data, tmp_path, monkeypatch, capsys):
    """On a full disk both fail, the save first."""
    run = Run(tmp_path / "run", data)

    def fail(*_, **__):
        raise StorageError("the save met a full disk")

    def fail_too(*_):
        raise StorageError("so did the metrics")

    monkeypatch.setattr(CheckpointStore, "save", fail)
    monkeypatch.setattr(trackers.JsonlTracker, "close", fail_too)
    assert run(total_steps=1) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")] == [
        "error: the save met a full disk"
    ]


def test_ctrl_c_while_the_packages_are_imported_ends_the_process_without_a_traceback(tmp_path):
    """A package that swallows KeyboardInterrupt, as some do in what they run while they are imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts without it
        "class Late:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jax':\n"
        "            try:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "            except KeyboardInterrupt:\n"
        "                pass\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    found = subprocess.run(
        [sys.executable, str(ROOT / "device_train.py"), "--config", "none.json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", [["device_train.py"], ["device_sample.py", "--random-init", "--prompt", "a"]])
def test_python_without_asserts_is_refused_in_a_line(data, tmp_path, command):
    """dm-haiku would lose its way, with a traceback; the checks of the config itself do not need asserts."""
    run = Run(tmp_path / "run", data)
    train_tokenizer(["abc"], 280, str(tmp_path / "tokenizer.json"))
    for keys, words in (({}, "does not work under `python -O`"), ({"n_heads": 6}, "n_heads (6) must be divisible")):
        keys |= {"n_vocab": 280, "tokenizer": str(tmp_path / "tokenizer.json")}
        found = subprocess.run(
            [sys.executable, "-O", str(ROOT / command[0]), *run.arguments(*command[1:], **keys)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 2 and words in found.stderr and "Traceback" not in found.stderr
