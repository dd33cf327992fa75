"""device_train.py with version 2 and ZeRO stage 3, in both layouts: a run that is cut ends as the straight one did."""

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_tools import assert_states_equal, without_fsync
from training_tools import Run, interrupt_at, make_data

from mesh_transformer.checkpoint import formats
from mesh_transformer.errors import EXIT_INTERRUPTED

pytestmark = pytest.mark.usefixtures("uncached")

ROOT = Path(__file__).parent.parent
V2 = {"d_head": 6, "ckpt_every": 2, "val_set": {}}
FORMATS = ["orbax", pytest.param("shards", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_run_that_is_cut_is_the_straight_one(tmp_path, data, monkeypatch, caplog, ckpt_format):
    without_fsync(monkeypatch)
    straight = Run(tmp_path / "straight", data, **V2, ckpt_format=ckpt_format)
    cut = Run(tmp_path / "cut", data, **V2, ckpt_format=ckpt_format)
    assert straight("--version", "2") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert cut("--version", "2") == EXIT_INTERRUPTED
    assert cut.store.latest() == 3
    assert formats.format_of(str(cut.model_dir / "step_3")) == ckpt_format
    assert cut("--version", "2") == 0
    assert cut.trace == straight.trace and len(cut.trace) == 6
    states = [run.store.restore(run.config(version=2), run.mesh).state for run in (straight, cut)]
    assert_states_equal(*states)
    assert cut("--version", "2") == 0 and "nothing left to train" in caplog.text


def test_the_version_decides_the_layout(tmp_path, data, capsys):
    """And a run of one version is not gone on with as the other."""
    run = Run(tmp_path / "run", data, **V2, total_steps=1)
    assert run("--version", "2") == 0
    assert formats.format_of(str(run.model_dir / "step_1")) == formats.ORBAX
    assert run("--version", "1", total_steps=2, d_head=4) == 2
    assert "version was 2 in the run and is 1 in this config" in capsys.readouterr().err


def test_fine_tuning_begins_at_a_step_of_orbax(tmp_path, data, caplog):
    source = Run(tmp_path / "source", data, **V2, total_steps=1)
    assert source("--version", "2") == 0
    tuned = Run(tmp_path / "tuned", data, **V2, total_steps=1, ckpt_format="shards")
    assert tuned("--version", "2", "--tune-model-path", str(source.model_dir)) == 0
    assert "fine-tuning from" in caplog.text
    assert int(tuned.store.restore(tuned.config(version=2), tuned.mesh).state.step) == 2


@pytest.mark.parametrize(
    ("kills", "steps", "ckpt_format"),
    [
        pytest.param(1, 16, "orbax", marks=pytest.mark.slow),
        pytest.param(30, 800, "orbax", marks=pytest.mark.long),
        pytest.param(10, 300, "shards", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path, kills, steps, ckpt_format):
    command = [sys.executable, "scripts/kill_test.py", "--folder", str(tmp_path), "--kills", str(kills)]
    command += ["--steps", str(steps), "--dp", "2", "--mp", "4", "--version", "2", "--ckpt-format", ckpt_format]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"passed: {kills} kills" in done.stdout
