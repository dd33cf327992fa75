"""Step times of ZeRO stages 0, 1 and 3 at the quickstart's shape, on eight simulated devices.

python benchmarks/zero.py [--meshes 8x1 4x2 2x4] [--versions 1 2] [--rounds 7] [--sequences 16]

A mesh's networks live in one process, and their steps alternate; medians, and their ratios to stage 0, are printed,
mesh after mesh. Every mesh takes the quickstart's update of 16 sequences, however many replicas share it. Exits 1 where
a ratio is above its bar: 1.15 for stage 1, 1.4 for stage 3.
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

from mesh_transformer import load_config, make_mesh  # noqa: E402
from mesh_transformer.mesh import choose_platform, find_devices  # noqa: E402
from mesh_transformer.transformer_shard import CausalTransformer  # noqa: E402
from mesh_transformer.transformer_zero import network_of  # noqa: E402

BARS = {0: 1.0, 1: 1.15, 3: 1.4}  # times stage 0
HEAD = ("| version | mesh | stage 0, ms | stage 1, ms | stage 3, ms | 1 / 0 | 3 / 0 |", "|---|---|---|---|---|---|---|")
Case = tuple[int, int, int, int]  # version, dp, mp, stage


def network(case: Case, sequences: int) -> CausalTransformer:
    version, dp, mp, stage = case
    changes: dict[str, Any] = {"cores_per_replica": mp, "zero_stage": stage, "per_replica_batch": sequences // dp}
    config = load_config(ROOT / "configs/quickstart.json", version=version, compute_dtype="float32", **changes)
    return network_of(config, make_mesh(config, find_devices(count=dp * mp)))


def measure(cases: list[Case], rounds: int, sequences: int) -> dict[Case, list[float]]:
    """Seconds of each step, {case: [rounds]}; one untimed step of each goes before."""
    networks = {case: network(case, sequences) for case in cases}
    some = next(iter(networks.values())).model
    tokens = np.random.default_rng(0).integers(0, some.n_vocab, (1, sequences, some.seq + 1))
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, one in networks.items():
            start = time.perf_counter()
            one.train(batch)
            jax.block_until_ready(one.state)
            if number:
                seconds[case].append(time.perf_counter() - start)
    return seconds


def rows(seconds: dict[Case, list[float]]) -> list[str]:
    lines = []
    for version, dp, mp in dict.fromkeys(case[:3] for case in seconds):
        none, one, three = (statistics.median(seconds[version, dp, mp, stage]) for stage in BARS)
        times = " | ".join(f"{1000 * value:.0f}" for value in (none, one, three))
        lines.append(f"| {version} | dp {dp} x mp {mp} | {times} | {one / none:.2f} | {three / none:.2f} |")
    return lines


def missed(seconds: dict[Case, list[float]]) -> list[str]:
    found = []
    for (version, dp, mp, stage), times in seconds.items():
        ratio = statistics.median(times) / statistics.median(seconds[version, dp, mp, 0])
        if ratio > BARS[stage]:
            found.append(f"version {version}, dp {dp} x mp {mp}, stage {stage}: {ratio:.2f}, the bar is {BARS[stage]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["8x1", "4x2", "2x4"], help="dp x mp, such as 8x1")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each (default 7)")
    parser.add_argument("--sequences", type=int, default=16, help="of an update, over all replicas (default 16)")
    options = parser.parse_args(arguments)
    meshes = [tuple(int(size) for size in mesh.split("x")) for mesh in options.meshes]
    choose_platform("cpu", max(dp * mp for dp, mp in meshes))
    print(f"jax {jax.__version__}, {options.rounds} rounds, {options.sequences} sequences an update, medians")
    print("\n".join(HEAD), flush=True)
    seconds: dict[Case, list[float]] = {}
    for dp, mp in meshes:
        cases = [(version, dp, mp, stage) for version in options.versions for stage in BARS]
        found = measure(cases, options.rounds, options.sequences)
        print("\n".join(rows(found)), flush=True)
        seconds |= found
    for line in missed(seconds):
        print(f"above its bar: {line}", file=sys.stderr)
    return 1 if missed(seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
