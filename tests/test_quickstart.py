"""The quickstart: its stages as they are run, in a short form, and the pieces that are its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import collect_python_text, plot_loss, quickstart

ROOT = Path(__file__).resolve().parent.parent


def run_quickstart(*arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, so that it decides the number of devices."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "scripts/quickstart.py", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def validation_losses(directory: Path) -> dict[int, float]:
    lines = (directory / "model" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return plot_loss.curves(lines)["python"]


@pytest.mark.slow
def test_short_form_learns_and_continues(tmp_path, capfd):
    """All stages from nothing; then the same again, which repeats no stage and trains no further."""
    first = run_quickstart("--short", "--directory", str(tmp_path))
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    for command in (
        "collect_python_text",
        "train_tokenizer",
        "create_finetune",
        "device_train",
        "plot_loss",
        "device_sample",
    ):
        assert command in first.stdout, "each command is printed"
    losses = validation_losses(tmp_path)
    assert losses[20] < 7.2 < 8.0 < 8.9, f"validation loss after 20 steps is {losses}"
    assert (tmp_path / "model" / "loss.png").stat().st_size > 5000

    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.tfrecords")}
    assert len(records) == 2, "one file to train on and one to validate on"
    config, path = quickstart.prepare(argparse.Namespace(directory=tmp_path, steps=quickstart.SHORT_STEPS))
    for number, stage in enumerate(quickstart.stages(config, path, quickstart.SHORT_MEGABYTES, prompts=()), start=1):
        if "plot" not in stage.command[0]:
            assert quickstart.run(stage, number, 0) == 0
    assert capfd.readouterr().out.count("is there already") == 3
    assert {path: path.stat().st_mtime_ns for path in records} == records
    assert validation_losses(tmp_path) == losses, "a finished run is not trained again"


@pytest.mark.long
def test_whole_quickstart(tmp_path, record_property):
    """The figures of the README: at most six minutes on two cores, validation loss below 4.5."""
    start = time.monotonic()
    done = run_quickstart("--directory", str(tmp_path))
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    losses = validation_losses(tmp_path)
    record_property("seconds", round(seconds))
    record_property("validation loss", round(losses[max(losses)], 3))
    assert losses[max(losses)] < 4.5
    assert seconds < 360


def test_steps_keep_the_schedule_whole():
    config = json.loads((ROOT / quickstart.CONFIG).read_text(encoding="utf-8"))
    for steps in (1, 7, 20, 5000):
        made = quickstart.with_steps(config, steps)
        assert made["warmup_steps"] + made["anneal_steps"] == max(steps, 1)
        assert 1 <= made["val_every"] <= steps and made["ckpt_every"] == made["val_every"]


def test_bad_steps_are_refused(capsys):
    assert quickstart.main(["--steps", "0"]) == 2
    assert "--steps is 0" in capsys.readouterr().err


def test_failing_stage_ends_it_with_its_status(tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    assert quickstart.run(quickstart.Stage("fails", (str(failing),)), 1, 1) == 7
    assert quickstart.run(quickstart.Stage("is done", (str(failing),), result=failing), 1, 1) == 0


def test_interrupt_waits_for_the_stage_to_save(tmp_path):
    """Ctrl-C reaches the quickstart and the stage; the quickstart ends with the stage's status, after it."""
    stage, ready = tmp_path / "stage.py", tmp_path / "ready"
    stage.write_text(
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(0.5)\n    sys.exit(75)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    program = (
        "import sys; from scripts import quickstart\n"
        f"sys.exit(quickstart.run(quickstart.Stage('waits', ({str(stage)!r},)), 1, 1))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(timeout=30) == 75


def library(folder: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_text_is_the_same_wherever_python_is(tmp_path):
    names = {"b.py": "b = 1\n", "a/__init__.py": "'''doc'''\n", "a/z.py": "z\n", "test/t.py": "no\n"}
    names |= {"_sysconfigdata_x.py": "path\n", "site-packages/p.py": "no\n", "encodings/cp1.py": "no\n", "e.py": " \n"}
    here = library(tmp_path / "one", names)
    there = library(tmp_path / "two" / "deeper", dict(reversed(names.items())))
    expected = {"a.__init__": "'''doc'''\n", "a.z": "z\n", "b": "b = 1\n"}
    assert collect_python_text.choose(here, 1000) == expected == collect_python_text.choose(there, 1000)
    assert list(collect_python_text.choose(here, 1000)) == sorted(expected)
    assert sum(len(text) for text in collect_python_text.choose(here, 10).values()) <= 10


def test_text_honours_encodings_and_leaves_out_what_is_not_text(tmp_path):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (folder / "broken.py").write_bytes(b"# \xe9\n")
    assert collect_python_text.choose(folder, 1000) == {"latin": "# -*- coding: latin-1 -*-\n# é\n"}


def test_text_folder_appears_whole_or_not_at_all(tmp_path, capsys):
    target = tmp_path / "text"
    target.with_name("text.partial").mkdir()  # an earlier run was killed
    assert collect_python_text.main(["--output-dir", str(target), "--max-mb", "0.1"]) == 0
    assert 50_000 < sum(path.stat().st_size for path in target.iterdir()) <= 100_000
    assert not target.with_name("text.partial").exists()
    assert collect_python_text.main(["--output-dir", str(target)]) == 2
    assert "exists" in capsys.readouterr().err


def test_curves_take_the_last_value_of_a_step_and_no_torn_line():
    lines = [
        '{"step": 1, "train/loss": 3.0, "train/cross_entropy": 2.5}',
        '{"step": 2, "train/loss": 2.0, "val/loss_a": 4.0}',
        '{"step": 2, "train/loss": 1.0, "val/loss_a": null}',
        '{"note": 1}',
        '{"step": 3, "train/lo',
    ]
    assert plot_loss.curves(lines) == {"train": {1: 2.5, 2: 1.0}, "a": {2: 4.0}}


def test_smoothing_keeps_a_constant_and_the_first_value():
    assert plot_loss.smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert plot_loss.smooth([8.0, 4.0])[0] == pytest.approx(8.0)
    assert 5.0 < plot_loss.smooth([8.0, 4.0])[1] < 7.0


def test_plot_says_what_is_missing(tmp_path, capsys):
    assert plot_loss.main([str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "x.png")]) == 2
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n", encoding="utf-8")
    assert plot_loss.main([str(empty), "--output", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert "none.jsonl" in said and "holds no loss" in said
