"""Faults at random moments, then the end: the same run as if nothing had happened (scripts/soak_pods.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import soak_pods

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("steps", "more", "faults"),
    [
        pytest.param(12, ["--least", "6", "--most", "6", "--kinds", "driver killed"], 1, marks=pytest.mark.slow),
        pytest.param(300, [], 7, marks=pytest.mark.long),
    ],
)
def test_a_pod_that_is_broken_again_and_again_ends_as_the_undisturbed_one(
    tmp_path, record_property, steps, more, faults
):
    command = [sys.executable, "scripts/soak_pods.py", "--folder", str(tmp_path), "--steps", str(steps), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = done.stdout.splitlines()[-1]
    assert result.startswith(f"passed: {steps} steps through "), result
    assert int(result.split("through ")[1].split()[0]) >= faults
    record_property("result", result)


def test_kinds_that_there_are_not_are_refused(capsys):
    with pytest.raises(SystemExit):
        soak_pods.parse(["--kinds", "earthquake"])
    assert "earthquake is unknown; there are process killed" in capsys.readouterr().err
