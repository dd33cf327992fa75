"""Conversions hold one tensor at a time, draw no weights and start no JAX; and the rehearsal of them at full size."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from weights_tools import ROOT

from benchmarks import rehearsal
from mesh_transformer.checkpoint import layout, publish, streaming

MB = 1_000_000
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status, which only Linux has")

# Prints the growth of the peak resident memory during a conversion, in bytes.
CHILD = """
import sys
import numpy as np
from benchmarks.rehearsal import peak_memory
from mesh_transformer.checkpoint import convert
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
source, out, what = sys.argv[1:]
before = peak_memory()
if what == "slim":
    convert.slim(source, out, FLOAT_TYPES["f16"])
else:
    convert.reshard(source, out, int(what), FLOAT_TYPES["f32"])
assert "jax" not in sys.modules
print(peak_memory() - before)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """168 MB of bfloat16 weights in eight shards, of which the largest tensor is 34 MB."""
    sizes = argparse.Namespace(layers=4, d_model=1024, n_heads=16, n_vocab=16384)
    config = rehearsal.config_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _handle: None)
        tensors = rehearsal.random_tensors(config.model, "bf16")
        details = {"config": config.to_dict()}
        return publish.write_weights(
            tmp_path_factory.mktemp("big"), config.model, 8, tensors, {layout.STEP: 1}, details
        )


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("what", ["1", "slim"])
def test_peak_memory_is_that_of_the_largest_tensor(source, tmp_path, what):
    with streaming.open_weights(source) as weights:
        tensors = [tensor.value.nbytes for tensor in weights.tensors()]
    largest, total = max(tensors), sum(tensors)
    command = [sys.executable, "-c", CHILD, source, str(tmp_path / "out"), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    growth = int(done.stdout)
    # Twice the largest tensor, and what the allocator keeps of freed pieces (40 to 65 MB seen; 300 are allowed):
    # holding all tensors would need more.
    assert growth < 2 * largest + 90 * MB < total, (growth, largest, total)
    shutil.rmtree(tmp_path / "out")


def check_rehearsal(options, folder):
    """Runs it; the table's rows."""
    rows = {row["stage"]: row for row in rehearsal.rehearse(options, folder)}
    assert list(rows) == list(rehearsal.STAGES)
    assert all(row["bytes"] > 0 and row["seconds"] > 0 for row in rows.values())
    assert [path.name for path in folder.iterdir()] == ["source"]
    return rows


@LINUX
@pytest.mark.slow
def test_a_small_rehearsal(tmp_path):
    sizes = ["--layers", "1", "--d-model", "128", "--n-heads", "16", "--n-vocab", "512"]
    options = rehearsal.parse([*sizes, "--dtype", "f32"])
    rows = check_rehearsal(options, tmp_path)
    text = rehearsal.table(options, list(rows.values()))
    assert text.count("\n| ") == 1 + len(rehearsal.STAGES)
    with streaming.open_weights(tmp_path / "source") as weights:
        values = next(weights.tensors()).value.astype(np.float32)
    assert 0 < np.abs(values).min() and np.abs(values).max() < 2


@LINUX
@pytest.mark.long
def test_the_rehearsal_at_full_size(tmp_path, record_property):
    """GPT-J-6B's shape, where the disk has room: under 4 GB of memory, at least half as fast as a copy."""
    if shutil.disk_usage(tmp_path).free < 30e9:
        pytest.skip("needs 30 GB of free disk")
    options = rehearsal.parse([])
    rows = check_rehearsal(options, Path(tmp_path))
    copied = rows["copy"]["bytes"] / rows["copy"]["seconds"]
    for stage, row in rows.items():
        speed = row["bytes"] / row["seconds"]
        record_property(stage, f"{speed / 1e6:.0f} MB/s, {speed / copied:.2f} of a copy, {row['peak'] / 1e9:.2f} GB")
        assert row["peak"] < 4e9, stage
        assert row["peak"] <= rehearsal.promised(options) or stage == "write", stage
        if stage in ("reshard to 1", "reshard to 16", "export to Hugging Face"):
            assert speed >= 0.5 * copied, stage
