"""Two hosts of this machine through Ray beside one process, at the quickstart's shape on eight simulated devices.

python benchmarks/pods.py [--rounds 12] [--starts 1]

Rounds of some steps of both alternate, so that what else the machine does meets both; as in a run, the numbers of a
step are read while the next one computes, and rows are sent one step ahead. Medians are printed, with the processes'
CPU time, and the ratio of their tokens/s, which is to be at least 0.9. Then what a step costs the driver itself, which
is to be at most 5 ms: the time in which it takes a batch, hands it out and takes in the numbers of the step before when
these are there already. Then how long train.py takes from its start to the first step, at most 25 s. Exits 1 where a
bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from mesh_transformer.training.executor import Executor, NetworkExecutor, TrainData  # noqa: E402
from mesh_transformer.transformer_zero import network_of  # noqa: E402

HOSTS, DEVICES = 2, 4
LEAST_RATIO, MOST_OVERHEAD, MOST_START = 0.9, 0.005, 25.0


class Repeated:
    """One batch without end, as training data."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        self._batch, self.position = batch, {"records": 0}

    def __iter__(self) -> Repeated:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return self._batch


def steps_in_a_row(executor: Executor, data: TrainData, count: int) -> None:
    """As the loop of a run does them: the numbers of each are read while the next one computes."""
    behind = executor.train(next(data))
    for _ in range(count - 1):
        ahead = executor.train(next(data))
        behind()
        behind = ahead
    behind()


def own_seconds(executor: Executor, data: TrainData, count: int, pause: float) -> list[float]:
    """The driver's own time of each step; `pause` is longer than a step takes."""
    found = []
    behind = executor.train(next(data))
    for _ in range(count):
        time.sleep(pause)  # so that the rows are sent and the step before has its numbers
        began = time.perf_counter()
        ahead = executor.train(next(data))
        sent = time.perf_counter()
        time.sleep(pause / 4)  # in which the call that brings them comes back
        back = time.perf_counter()
        behind()
        found.append(sent - began + time.perf_counter() - back)
        behind = ahead
    behind()
    return found


def cpu_seconds(pids: list[int]) -> float:
    """That these processes have used so far."""
    ticks = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids)
    return sum(int(tick) for both in ticks for tick in both) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Measured:
    """Per step of each, by round: seconds, and CPU seconds of this process and of the hosts'; then the driver's own
    seconds; tokens of a step."""

    seconds: dict[str, list[float]]
    cpu: dict[str, list[tuple[float, float]]]
    own: list[float]
    tokens: int


def alternate(rounds: int, count: int) -> Measured:
    config = load_config(ROOT / "configs/quickstart.json")
    choose_platform("cpu", HOSTS * DEVICES)
    network = network_of(config, make_mesh(config, find_devices("cpu")))
    rows, model = config.mesh.per_replica_batch * 2, config.model
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, (1, rows, model.seq + 1)).astype(np.int32)
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}
    store = CheckpointStore(".")
    with pod.started(LocalHosts(HOSTS, DEVICES), config, Patience()) as started:
        machine = started.hold(config)
        machine.draw()
        run: dict[str, tuple[Executor, TrainData]] = {
            "alone": (NetworkExecutor(network, store, config, {}), Repeated(batch)),
            "pod": (machine.executor(store, config, {}), machine.feed(Repeated(batch))),
        }
        for executor, data in run.values():
            steps_in_a_row(executor, data, 2)  # the first compiles
        found = Measured({name: [] for name in run}, {name: [] for name in run}, [], rows * model.seq)
        pids = [joined.pid for joined in started.crew.joined]
        for _ in range(rounds):
            for name, (executor, data) in run.items():
                cpu, began = (cpu_seconds([os.getpid()]), cpu_seconds(pids)), time.perf_counter()
                steps_in_a_row(executor, data, count)
                found.seconds[name].append((time.perf_counter() - began) / count)
                here, there = cpu_seconds([os.getpid()]) - cpu[0], cpu_seconds(pids) - cpu[1]
                found.cpu[name].append((here / count, there / count))
        found.own = own_seconds(*run["pod"], rounds, 2 * max(found.seconds["pod"]))
    return found


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
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds of each (12)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round (5)")
    parser.add_argument("--starts", type=int, default=1, help="timed starts of train.py (1)")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        starts = [start_seconds(Path(folder)) for _ in range(options.starts)]
    found = alternate(options.rounds, options.steps)
    alone, both = (statistics.median(found.seconds[name]) for name in ("alone", "pod"))
    own, first = statistics.median(found.own), min(starts, default=0.0)
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, load {load:.1f} before, medians of {options.rounds} rounds of "
        f"{options.steps} steps"
    )
    print("| | ms a step | tokens/s | CPU ms a step: driver | hosts |\n|---|---|---|---|---|")
    names = (f"one process, {HOSTS * DEVICES} devices", f"{HOSTS} hosts x {DEVICES} devices through Ray")
    for name, label in zip(("alone", "pod"), names, strict=True):
        seconds = statistics.median(found.seconds[name])
        here, there = (1000 * statistics.median(column) for column in zip(*found.cpu[name], strict=True))
        print(f"| {label} | {1000 * seconds:.0f} | {found.tokens / seconds:,.0f} | {here:.0f} | {there:.0f} |")
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
