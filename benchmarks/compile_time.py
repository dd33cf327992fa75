"""Seconds to compile a training step at two depths: layers are scanned, so depth must not matter.

python benchmarks/compile_time.py [--layers 2 28] [--repeats 5] [--dp 2] [--mp 4]

The depths alternate, each compile in a fresh step function; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer import load_config, make_mesh, steps, transformer_shard  # noqa: E402
from mesh_transformer.mesh import choose_platform  # noqa: E402


def compile_seconds(layers: int, dp: int, mp: int) -> float:
    config = load_config({
        "layers": layers, "d_model": 256, "n_heads": 8, "n_vocab": 4096, "seq": 256, "pe_rotary_dims": 32,
        "cores_per_replica": mp, "per_replica_batch": 1, "lr": 1e-4, "total_steps": 10, "train_set": "none.index",
    })  # fmt: skip
    network = transformer_shard.CausalTransformer(config, make_mesh(config))
    row = np.zeros((1, dp, 256), np.int32)
    batch: Any = steps.place(network.mesh, steps.BATCH_SPEC, steps.Batch(row, row, row.astype(np.float32)))
    state = network.state
    transformer_shard.train_step.cache_clear()
    step = transformer_shard.train_step(network.model, config.optim, network.mesh)
    start = time.perf_counter()
    step.lower(state, batch).compile()
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 28])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--mp", type=int, default=4)
    options = parser.parse_args(arguments)
    choose_platform("cpu", options.dp * options.mp)
    seconds: dict[int, list[float]] = {layers: [] for layers in options.layers}
    for _ in range(options.repeats):
        for layers in options.layers:
            seconds[layers].append(compile_seconds(layers, options.dp, options.mp))
    few, many = (statistics.median(seconds[layers]) for layers in options.layers)
    print(f"jax {jax.__version__}, mesh dp {options.dp} x mp {options.mp}")
    print(f"{options.layers[0]} layers {few:.2f} s, {options.layers[1]} layers {many:.2f} s: {many / few:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
