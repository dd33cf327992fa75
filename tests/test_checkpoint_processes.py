"""Several processes write one step of "orbax" together, each its own part; any number of processes reads it."""

import subprocess
import sys
from pathlib import Path

import pytest
from bucket_tools import free_port
from conftest import mesh_of
from orbax_process import CONFIG, check, made_state

from mesh_transformer.checkpoint import formats, inspect, manifest
from mesh_transformer.config import load_config

pytestmark = pytest.mark.usefixtures("uncached")

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_processes_write_and_read_one_step(tmp_path, count):
    config = load_config(CONFIG)
    alone = made_state(config.model, mesh_of(1, 4), 0)
    formats.write_step(tmp_path / "alone" / "step_9", alone, config, {"step": 9, "config": config.to_dict()})
    command = [sys.executable, str(HERE / "orbax_process.py"), f"127.0.0.1:{free_port()}", str(count)]
    processes = [
        subprocess.Popen([*command, str(i), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(count)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, words) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0 and f"process {number} is done" in words, words[-3000:]
    step = str(tmp_path / "step_9")
    check(config.model, formats.read_step(step, config.model, mesh_of(4, 2), zero_stage=1))
    assert "checksums of all files" in inspect.verify(step)
    sums = [{n: e for n, e in manifest.read(path).files.items() if "norm_scale" in n or "step" in n}
            for path in (step, str(tmp_path / "alone" / "step_9"))]  # fmt: skip
    assert sums[0] == sums[1]  # what is not cut is the same, however many wrote it
