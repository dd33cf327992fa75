"""kill -9 at random moments, then finish: the same run as if nothing had happened (scripts/kill_test.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("kills", "steps", "dp", "mp"),
    [
        pytest.param(2, 24, 2, 2, marks=pytest.mark.slow),
        pytest.param(30, 800, 2, 4, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path, record_property, kills, steps, dp, mp):
    command = [sys.executable, "scripts/kill_test.py", "--folder", str(tmp_path), "--kills", str(kills)]
    command += ["--steps", str(steps), "--dp", str(dp), "--mp", str(mp)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"passed: {kills} kills" in done.stdout
    record_property("result", done.stdout.splitlines()[-1])
