"""Loading needs little more memory than the state itself, saving little more than one copy of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MB = 1_000_000


def measure(folder, phase, megabytes, shards, mp, ckpt_format="shards"):
    command = [sys.executable, "benchmarks/checkpoint.py", "--phase", phase, "--folder", str(folder)]
    command += ["--megabytes", str(megabytes), "--shards", str(shards), "--mp", str(mp), "--format", ckpt_format]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# In the short form the state is small, so that the allowance has to be too: loading everything before placing it,
# which doubles the state, or a second copy when saving, would exceed it. The long form has the figures promised.
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm, which only Linux has")
@pytest.mark.parametrize(
    ("megabytes", "shards", "mp", "allowance", "ckpt_format"),
    [
        pytest.param(200, 4, 2, 60 * MB, "shards", marks=pytest.mark.slow),
        pytest.param(300, 4, 4, 110 * MB, "orbax", marks=pytest.mark.slow),
        pytest.param(1200, 8, 8, 200 * MB, "shards", marks=pytest.mark.long),
        pytest.param(1200, 1, 1, 200 * MB, "shards", marks=pytest.mark.long),
        pytest.param(3200, 8, 1, 200 * MB, "shards", marks=pytest.mark.long),
        pytest.param(1200, 8, 8, 200 * MB, "orbax", marks=pytest.mark.long),
        pytest.param(1200, 1, 1, 200 * MB, "orbax", marks=pytest.mark.long),
    ],
)
def test_peak_memory(tmp_path, record_property, megabytes, shards, mp, allowance, ckpt_format):
    saved = measure(tmp_path, "save", megabytes, shards, mp, ckpt_format)
    record_property("state_MB", round(saved["state"] / MB))
    record_property("saving_MB_above_snapshot", round(saved["above_snapshot"] / MB))
    record_property("saving_GB_per_second", round(saved["gb_per_second"], 2))
    assert saved["state"] > 0.9 * megabytes * MB
    assert saved["peak"] <= saved["state"] + allowance, saved
    for phase in ("load", "load-slim"):
        loaded = measure(tmp_path, phase, megabytes, shards, mp, ckpt_format)
        record_property(f"{phase}_times_state", round(loaded["times_state"], 3))
        record_property(f"{phase}_GB_per_second", round(loaded["gb_per_second"], 2))
        assert loaded["peak"] <= 1.3 * loaded["state"] + allowance, loaded
