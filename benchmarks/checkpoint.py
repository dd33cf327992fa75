"""Peak host memory and speed of saving and loading a checkpoint, each in a process of its own.

    python benchmarks/checkpoint.py --megabytes 1200 --shards 8 --dp 1 --mp 8

Prints one JSON line per phase. `state` is the bytes of parameters, Adam moments and counters, each counted once. For
loading, `peak` is the growth of the process's peak resident memory from just before to just after, so it contains the
loaded state itself; for saving, it is what was needed above the state that was there before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LAYERS = 6


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1200, help="size of the state")
    parser.add_argument("--shards", type=int, default=8, help="M of the files")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--mp", type=int, default=8)
    parser.add_argument("--format", choices=("shards", "orbax"), default="shards", help="layout (shards)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder, removed)")
    parser.add_argument("--phase", choices=("save", "load", "load-slim"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def config_for(megabytes: int, shards: int, ckpt_format: str) -> Any:
    """A model whose full state takes about so many megabytes, most of it in its layers, as in large models."""
    from mesh_transformer.config import load_config

    # 12 bytes a parameter; 12 D^2 in a layer, 8 D in the vocabulary's two matrices of 4 D tokens each
    d_model = 64 * max(1, round(math.sqrt(megabytes * 1e6 / 12 / (12 * LAYERS + 8)) / 64))
    return load_config({
        "layers": LAYERS, "d_model": d_model, "n_heads": 16, "n_vocab": 4 * d_model, "seq": 128, "pe_rotary_dims": 4,
        "cores_per_replica": shards, "total_steps": 1, "train_set": "none", "model_dir": "none",
        "ckpt_format": ckpt_format,
    })  # fmt: skip


class PeakMemory:
    """Resident memory, sampled every few milliseconds: its peak above where it began, in bytes."""

    def __init__(self) -> None:
        self.before = self.peak = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def growth(self) -> int:
        return self.peak - self.before

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, resident())

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, resident())


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def run_phase(options: argparse.Namespace) -> dict[str, Any]:
    """One phase in this process, which must not have started JAX before."""
    import jax
    import numpy as np

    from mesh_transformer.mesh import DP, MP, choose_platform

    choose_platform("cpu", options.dp * options.mp)
    config = config_for(options.megabytes, options.shards, options.format)
    grid = np.asarray(jax.devices()[: options.dp * options.mp]).reshape(options.dp, options.mp)
    mesh = jax.sharding.Mesh(grid, (DP, MP))
    if options.phase == "save":
        return _save(options.folder, config, mesh)
    return _load(options.folder, config, mesh, optimizer=options.phase == "load")


def _save(folder: str, config: Any, mesh: Any) -> dict[str, Any]:
    from mesh_transformer.checkpoint.snapshot import snapshot
    from mesh_transformer.checkpoint.store import CheckpointStore

    state = _made_state(config, mesh)
    size = snapshot(state).nbytes
    store = CheckpointStore(folder)
    with PeakMemory() as memory:
        began = time.perf_counter()
        store.save(1, state, config)
        blocked = time.perf_counter() - began
        store.wait()
        seconds = time.perf_counter() - began
    return {
        "phase": "save", "state": size, "peak": memory.growth, "above_snapshot": memory.growth - size,
        "blocked_seconds": blocked, "seconds": seconds, "gb_per_second": size / seconds / 1e9,
    }  # fmt: skip


def _load(folder: str, config: Any, mesh: Any, optimizer: bool) -> dict[str, Any]:
    import jax

    from mesh_transformer.checkpoint.formats import read_step
    from mesh_transformer.checkpoint.store import find_step

    jax.block_until_ready(jax.device_put(0.0))  # the runtime's own memory is there before
    with PeakMemory() as memory:
        began = time.perf_counter()
        state = read_step(find_step(folder), config.model, mesh, optimizer=optimizer)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {
        "phase": "load" if optimizer else "load-slim", "state": size, "peak": memory.growth,
        "times_state": memory.growth / size, "seconds": seconds, "gb_per_second": size / seconds / 1e9,
    }  # fmt: skip


def _made_state(config: Any, mesh: Any) -> Any:
    """Random parameters and moments, placed."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from mesh_transformer import parameters
    from mesh_transformer.mesh import MP, replicated
    from mesh_transformer.state import OptimizerState, TrainState

    kinds = parameters.kinds(config.model, mesh.shape[MP])

    def tree(seed: int) -> Any:
        random = np.random.default_rng(seed)

        def one(kind: Any) -> Any:
            values = random.standard_normal(kind.shape, np.float32)
            return jax.block_until_ready(jax.device_put(values, NamedSharding(mesh, kind.spec())))

        return parameters.tree((kind, one(kind)) for kind in kinds)

    counter = jax.device_put(np.int32(1), replicated(mesh))
    return TrainState(tree(0), OptimizerState(counter, tree(1), tree(2), counter), counter)


@contextlib.contextmanager
def _folder(given: str | None) -> Iterator[str]:
    folder = given or tempfile.mkdtemp(prefix="checkpoint-benchmark-")
    try:
        yield folder
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.phase:
        print(json.dumps(run_phase(options)))
        return 0
    with _folder(options.folder) as folder:
        for phase in ("save", "load", "load-slim"):
            command = [sys.executable, __file__, "--phase", phase, "--folder", folder]
            for name in ("megabytes", "shards", "dp", "mp", "format"):
                command += [f"--{name}", str(getattr(options, name))]
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
