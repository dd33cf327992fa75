"""Two hosts of this machine through Ray beside one process, at the quickstart's shape on eight simulated devices.

python benchmarks/pods.py [--rounds 12] [--starts 1]

Steps of both alternate, so that what else the machine does meets both; medians are printed, and the ratio of their
tokens/s, which is to be at least 0.9. Then what a step costs the driver itself, which is to be at most 5 ms: the time
in which it hands out a step and takes in its numbers when these are there already. Then how long train.py takes from
its start to the first step, at most 25 s. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer import load_config, make_mesh  # noqa: E402
from mesh_transformer.checkpoint.store import CheckpointStore  # noqa: E402
from mesh_transformer.cluster import pod  # noqa: E402
from mesh_transformer.cluster.local_hosts import LocalHosts  # noqa: E402
from mesh_transformer.cluster.pod import Patience  # noqa: E402
from mesh_transformer.data.records import RecordWriter  # noqa: E402
from mesh_transformer.mesh import choose_platform, find_devices  # noqa: E402
from mesh_transformer.transformer_zero import network_of  # noqa: E402

HOSTS, DEVICES = 2, 4
LEAST_RATIO, MOST_OVERHEAD, MOST_START = 0.9, 0.005, 25.0


def alternate(rounds: int) -> tuple[dict[str, list[float]], list[float], int]:
    """Seconds of each step, alone and on the pod; the driver's own seconds of further ones; tokens of a step."""
    config = load_config(ROOT / "configs/quickstart.json")
    choose_platform("cpu", HOSTS * DEVICES)
    network = network_of(config, make_mesh(config, find_devices("cpu")))
    rows, model = config.mesh.per_replica_batch * 2, config.model
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, (1, rows, model.seq + 1)).astype(np.int32)
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}
    seconds: dict[str, list[float]] = {"alone": [], "pod": []}
    overhead = []
    with pod.started(LocalHosts(HOSTS, DEVICES), config, Patience()) as started:
        machine = started.hold(config)
        machine.draw()
        executor = machine.executor(CheckpointStore("."), config, {})
        for number in range(rounds + 1):
            for name in seconds:
                began = time.perf_counter()
                if name == "alone":
                    jax.device_get(network.train(batch))
                else:
                    executor.train(batch)()
                if number:  # the first compiles
                    seconds[name].append(time.perf_counter() - began)
        for _ in range(rounds):
            began = time.perf_counter()
            numbers = executor.train(batch)
            sent = time.perf_counter()
            time.sleep(2 * max(seconds["pod"]))  # so that they are there
            back = time.perf_counter()
            numbers()
            overhead.append(sent - began + time.perf_counter() - back)
    return seconds, overhead, rows * model.seq


def start_seconds(folder: Path) -> float:
    """From the start of train.py to the first step's line."""
    flat = json.loads((ROOT / "configs/quickstart.json").read_text())
    with (folder / "a.tfrecords").open("wb") as file:
        writer = RecordWriter(file)
        for row in np.random.default_rng(0).integers(0, flat["n_vocab"], (64, flat["seq"] + 1)):
            writer.write({"text": row})
    (folder / "train.index").write_text("a.tfrecords\n")
    flat |= {"data_dir": str(folder), "train_set": "train.index", "val_set": {}, "model_dir": str(folder / "model")}
    config = folder / "config.json"
    config.write_text(json.dumps(flat | {"total_steps": 2}))
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config), "--tpu", "local"]
    command += ["--hosts", str(HOSTS), "--devices-per-host", str(DEVICES), "--new", "--yes"]
    metrics = folder / "model" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    if process.wait():
        raise SystemExit(f"train.py ended with exit code {process.returncode}")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each (12)")
    parser.add_argument("--starts", type=int, default=1, help="timed starts of train.py (1)")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        starts = [start_seconds(Path(folder)) for _ in range(options.starts)]
    seconds, overhead, tokens = alternate(options.rounds)
    alone, both = (statistics.median(seconds[name]) for name in ("alone", "pod"))
    own, first = statistics.median(overhead), min(starts, default=0.0)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {load:.1f} before, medians of {options.rounds} steps")
    print("| | ms a step | tokens/s |\n|---|---|---|")
    print(f"| one process, {HOSTS * DEVICES} devices | {1000 * alone:.0f} | {tokens / alone:,.0f} |")
    print(f"| {HOSTS} hosts x {DEVICES} devices through Ray | {1000 * both:.0f} | {tokens / both:,.0f} |")
    print(f"ratio of tokens/s {alone / both:.2f}; the driver's own time a step {1000 * own:.1f} ms; ", end="")
    print(f"from the start of train.py to its first step {first:.1f} s")
    bars = {
        f"ratio {alone / both:.2f}, the bar is {LEAST_RATIO}": alone / both >= LEAST_RATIO,
        f"driver {1000 * own:.1f} ms, the bar is {1000 * MOST_OVERHEAD:.0f}": own <= MOST_OVERHEAD,
        f"start {first:.1f} s, the bar is {MOST_START:.0f}": first <= MOST_START,
    }
    for line in (line for line, held in bars.items() if not held):
        print(f"missed: {line}", file=sys.stderr)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
