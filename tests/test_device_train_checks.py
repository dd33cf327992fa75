"""device_train.py's checks: what it refuses and when, dry runs, --new, epochs, damaged checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from training_tools import PER_STEP, ROOT, Run, S, interrupt_at, write_file

from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data import sidecar
from mesh_transformer.data.tokenizer import train_tokenizer
from mesh_transformer.errors import StorageError
from mesh_transformer.optimizer import schedule
from mesh_transformer.training import local, trackers


def test_a_run_made_longer_or_shorter_keeps_a_schedule_that_was_a_default(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
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


def test_other_data_are_refused_unless_reset(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path / "run", training_data)
    shutil.copytree(straight.model_dir, run.model_dir)
    (training_data / "other.index").write_text("b.tfrecords\n")
    assert run(total_steps=7, train_set="other.index") == 2
    assert "--reset-data" in capsys.readouterr().err
    assert run("--reset-data", total_steps=7, train_set="other.index") == 0
    position = run.store.aux(7)["train_loader"]
    assert (position["records"], position["epoch_records"]) == (7 * PER_STEP, PER_STEP)
    assert run.lines[-1]["sequences_processed"] == 7 * PER_STEP
    # From then on those are the run's data.
    assert run(total_steps=8, train_set="other.index") == 0


def test_new_asks_and_needs_yes_without_a_terminal(straight, training_data, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path / "run", training_data, total_steps=1)
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


@pytest.mark.parametrize("more", [(), ("--new", "--yes")])
def test_what_is_in_the_way_of_a_step_is_refused_before_devices_start(
    training_data, tmp_path, monkeypatch, capsys, more
):
    def refuse(*_):
        raise AssertionError("devices were started")

    monkeypatch.setattr(local, "choose_platform", refuse)
    run = Run(tmp_path / "run", training_data)
    (run.model_dir / "step_5").mkdir(parents=True)
    (run.model_dir / "step_5" / "notes.txt").write_text("mine")
    assert run(*more) == 2
    assert "step_5, where step 5 would be saved, holds notes.txt" in capsys.readouterr().err
    (run.model_dir / "step_5" / "notes.txt").unlink()
    (run.model_dir / "step_5").rmdir()
    (run.model_dir / "step_5").write_text("a file of that name")
    assert run(*more) == 2
    assert "step_5: cannot list: Not a directory; a file stands where a folder is needed" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="devices"):  # it is in the way of no step of this run
        run(*more, total_steps=4)


@pytest.mark.parametrize("url", ["s3://bucket/run", "https://host/run", "nonsense://host/run"])
def test_a_model_dir_that_can_only_be_read_is_refused_before_anything_is_looked_at(tmp_path, capsys, url):
    run = Run(tmp_path / "run", tmp_path / "none", model_dir=url)
    assert run() == 2
    assert f"model_dir ({url}) is a URL that can only be read" in capsys.readouterr().err


def test_a_dry_run_leaves_nothing_behind(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path / "run", training_data, val_every=2, trackers=["tensorboard", "wandb"])
    assert run("--dry-run") == 0
    shown = capsys.readouterr().err
    assert "one step: loss" in shown and "validation on v: loss" in shown and "nothing was written" in shown
    assert not run.model_dir.exists()
    before = straight.files()
    assert straight("--dry-run", total_steps=7) == 0
    assert straight.files() == before


def test_what_cannot_work_is_said_before_weights_are_drawn(training_data, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(CausalTransformer, "state", property(refuse))
    run = Run(tmp_path / "run", training_data)
    (tmp_path / "file").write_text("")
    for more, keys, expected in (
        (["--platform", "tpu"], {}, "platform 'tpu' was asked for, but JAX found 'cpu'"),
        ([], {"train_set": "none.index"}, "none.index"),
        ([], {"val_set": {"v": "none.index"}}, "none.index"),
        ([], {"n_vocab": 32}, "n_vocab"),
        ([], {"seq": 8}, "seq"),
        ([], {"model_dir": str(tmp_path / "file" / "model")}, "a file stands where a folder is needed"),
        ([], {"model_dir": str(tmp_path / "a\0b")}, "cannot hold the character NUL"),
        (["--devices", "6"], {}, "6 devices cannot be split into replicas of cores_per_replica (4)"),
        ([], {"val_every": -1}, "val_every"),
        (["--tune-model-path", str(tmp_path / "none")], {}, str(tmp_path / "none")),
    ):
        assert run(*more, **keys) == 2, expected
        assert expected in capsys.readouterr().err
        assert not run.model_dir.exists()


def test_a_config_that_cannot_be_trained_is_refused_before_devices_start(training_data, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("devices were started")

    monkeypatch.setattr(local, "choose_platform", refuse)
    run = Run(tmp_path / "run", training_data, epochs=1, total_steps=None)
    assert run(early_cast=True, bf16_optimizer=True) == 2
    message = capsys.readouterr().err
    assert "early_cast cannot be used in training" in message and "bf16_optimizer cannot" in message
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(trackers=["wandb"]) == 2
    assert "trackers has wandb, which needs the package wandb" in capsys.readouterr().err


def test_data_of_another_tokenizer_are_refused_even_after_a_reset(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path / "run", training_data)
    for name, hash_ in (("one", "1" * 32), ("two", "2" * 32)):
        path = training_data / f"{name}.tfrecords"
        write_file(path, 12, 3)
        sidecar.write(str(path), {"bytes": path.stat().st_size, "records": 12, "seq": S, "tokenizer_hash": hash_})
        (training_data / f"{name}.index").write_text(f"{name}.tfrecords\n")
    assert run(total_steps=1, train_set="one.index") == 0
    assert run("--reset-data", total_steps=2, train_set="two.index") == 2
    assert f"tokenizer_hash was '{'1' * 32}' in the run and is '{'2' * 32}'" in capsys.readouterr().err
    # Data that do not tell their tokenizer are compared by nothing.
    assert run("--reset-data", total_steps=2) == 0


def test_epochs_are_resolved_from_the_records(training_data, tmp_path, capsys):
    run = Run(tmp_path, training_data, epochs=1, total_steps=None)
    assert run() == 0
    assert "1 epochs of 32 sequences: total_steps 8" in capsys.readouterr().err
    assert [line["step"] for line in run.lines] == list(range(1, 9))
    assert run() == 0


def test_a_damaged_newest_checkpoint_is_passed_over_or_refused(straight, training_data, tmp_path, capsys):
    run = Run(tmp_path / "run", training_data, val_every=2, ckpt_every=2)
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
    straight, training_data, tmp_path, capsys, monkeypatch
):
    run = Run(tmp_path / "run", training_data)
    shutil.copytree(straight.model_dir, run.model_dir)
    interrupt_at(monkeypatch, 1)
    assert run("--reset-data", total_steps=9) == 75
    assert "--reset-data" not in capsys.readouterr().err.partition("to go on: ")[2]
    # Nor does an option that is cut short slip through: none is understood.
    with pytest.raises(SystemExit, match="2"):
        run("--ne", "--yes")
    assert run.store.steps() == [4, 6, 7]


def test_what_closing_a_tracker_meets_does_not_hide_why_the_run_ended(training_data, tmp_path, monkeypatch, capsys):
    """On a full disk both fail, the save first."""
    run = Run(tmp_path / "run", training_data)

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


def test_python_without_asserts_is_refused_by_the_networks_themselves():
    program = (
        "from mesh_transformer import *\n"
        "from conftest import mesh_of, tiny\n"
        "CausalTransformer(load_config(tiny()), mesh_of(1, 1))"
    )
    found = subprocess.run(
        [sys.executable, "-O", "-c", program], env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ConfigError" in found.stderr and "does not work under `python -O`" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["device_train.py"], ["device_sample.py", "--random-init", "--prompt", "a"]])
def test_python_without_asserts_is_refused_in_a_line(training_data, tmp_path, command):
    """dm-haiku would lose its way, with a traceback; the checks of the config itself do not need asserts."""
    run = Run(tmp_path / "run", training_data)
    train_tokenizer(["abc"], 280, str(tmp_path / "tokenizer.json"))
    for keys, words in (({}, "does not work under `python -O`"), ({"n_heads": 6}, "n_heads (6) must be divisible")):
        keys |= {"n_vocab": 280, "tokenizer": str(tmp_path / "tokenizer.json")}
        found = subprocess.run(
            [sys.executable, "-O", str(ROOT / command[0]), *run.arguments(*command[1:], **keys)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 2 and words in found.stderr and "Traceback" not in found.stderr
