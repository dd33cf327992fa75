"""What the tests of weights share: states of chosen values, golden steps, and plain reading of what was written."""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import zstandard
from checkpoint_tools import random_tree, read_plain
from conftest import tiny

from mesh_transformer import parameters
from mesh_transformer.config import load_config
from mesh_transformer.state import OptimizerState, TrainState

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
ARCHIVE = GOLDEN / "v1_rotary_mp4_f32" / "step_8.tar.zstd"  # full, trained on four shards
assert len(jax.devices()) == 8  # JAX starts with them all, before a script asks for fewer
VALUES = ("fresh", "trained", "equal", "zeros")


def config_file(folder, **changes):
    """The path of a tiny config's JSON file, made in `folder`."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(tiny(**changes)))
    return str(path)


def golden_config(case, **changes):
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    return {**raw, "total_steps": 100, "train_set": "none.index", "model_dir": "none", "name": "golden", **changes}


def extract_golden(folder):
    """The full golden step, extracted by tarfile alone."""
    with ARCHIVE.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(folder, filter="data")
    return Path(folder) / "step_8"


def state_of(model, values, seed=0):
    """A full state on the host, of one of VALUES, at Adam's count 7, the schedule's 5 and step 9."""
    trees = [random_tree(model, 1, 10 * seed + i) for i in range(3)]
    if values in ("equal", "zeros"):
        fill = 0.0 if values == "zeros" else 0.37
        trees = [jax.tree.map(lambda array: np.full_like(array, fill), tree) for tree in trees]
    elif values == "fresh":
        constants = parameters.tree(
            (kind, None if kind.random else np.full(kind.shape, kind.init, np.float32))
            for kind in parameters.kinds(model, 1)
        )
        drawn = trees[0]
        params = {m: {n: drawn[m][n] if c is None else c for n, c in group.items()} for m, group in constants.items()}
        trees = [params, *(jax.tree.map(np.zeros_like, tree) for tree in trees[1:])]
    return TrainState(trees[0], OptimizerState(np.int32(7), trees[1], trees[2], np.int32(5)), np.int32(9))


def assert_same_arrays(found, expected, shards):
    """Every array of every shard equal in type, shape and bits."""
    for shard in range(shards):
        pairs = list(zip(read_plain(found, shard), read_plain(expected, shard), strict=True))
        for number, (a, b) in enumerate(pairs):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (shard, number)
            assert a.tobytes() == b.tobytes(), (shard, number)


def model_of(**changes):
    return load_config(tiny(**changes)).model
