"""What a pod's step costs without Ray: bare processes of jax.distributed at the quickstart's shape.

python benchmarks/pod_processes.py [--rounds 6] [--steps 5]

Rounds alternate of one process with eight simulated devices, one with eight whose collectives go through gloo as a
pod's do, and two with four each. Prints medians: ms a step, and CPU ms a step of all processes of a row together, with
what of that was spent in the kernel; CPU time says most on a machine that others use.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

# name: processes, devices of each, whether they join through jax.distributed
ROWS = {
    "one process, 8 devices": (1, 8, False),
    "one process, 8 devices, through gloo": (1, 8, True),
    "2 processes x 4 devices": (2, 4, True),
}


def work(coordinator: str, count: int, number: int, devices: int, orders: IO[str], answers: IO[str]) -> None:
    """One process: for each line with a number of steps, a line of seconds and CPU seconds (user, kernel)."""
    import jax
    import numpy as np

    from mesh_transformer import load_config, make_mesh, steps
    from mesh_transformer.mesh import choose_platform
    from mesh_transformer.transformer_zero import network_of

    choose_platform("cpu", devices)
    jax.config.update("jax_enable_compilation_cache", False)  # as a pod's processes have it
    if coordinator:
        jax.distributed.initialize(coordinator, count, number)
    config = load_config(ROOT / "configs/quickstart.json")
    mesh = make_mesh(config, sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    network, own = network_of(config, mesh), steps.replicas_of(mesh, number)
    shape = (1, config.mesh.per_replica_batch * len(own), config.model.seq + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.n_vocab, shape)
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}

    def run(steps_wanted: int) -> None:
        behind = network.train(batch, own)
        for _ in range(steps_wanted - 1):
            ahead = network.train(batch, own)
            jax.device_get(behind)
            behind = ahead
        jax.device_get(behind)

    run(2)  # the first compiles
    print("ready", file=answers, flush=True)
    for order in orders:
        cpu, began = os.times(), time.perf_counter()
        run(int(order))
        took, after = time.perf_counter() - began, os.times()
        print(took, after.user - cpu.user, after.system - cpu.system, file=answers, flush=True)


def start(count: int, devices: int, joined: bool) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}" if joined else ""
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--work", coordinator, str(count), str(number), str(devices)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for number in range(count)
    ]  # fmt: skip


def answers_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    lines = [process.stdout.readline() if process.stdout else "" for process in processes]
    if not all(lines):
        raise SystemExit("a process ended")
    return lines


def measure(processes: list[subprocess.Popen[str]], count: int) -> tuple[float, float, float]:
    """ms a step, and CPU ms a step of all: in all, and in the kernel."""
    for process in processes:
        print(count, file=process.stdin, flush=True)
    found = [[float(word) for word in line.split()] for line in answers_of(processes)]
    kernel = sum(each[2] for each in found)
    scale = 1000 / count
    return max(each[0] for each in found) * scale, (sum(each[1] for each in found) + kernel) * scale, kernel * scale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds of each (6)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round (5)")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # gloo prints
        coordinator, *numbers = options.work
        work(coordinator, *map(int, numbers), sys.stdin, answers)
        return 0
    with contextlib.ExitStack() as stack:
        groups = {}
        for name, row in ROWS.items():
            groups[name] = start(*row)
            for process in groups[name]:
                stack.callback(process.kill)
            answers_of(groups[name])
        load = os.getloadavg()[0]
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in groups}
        for _ in range(options.rounds):
            for name, processes in groups.items():
                found[name].append(measure(processes, options.steps))
    print(
        f"{os.cpu_count()} cores, load {load:.1f} before, medians of {options.rounds} rounds of {options.steps} steps"
    )
    print("| | ms a step | CPU ms a step | of that in the kernel |\n|---|---|---|---|")
    for name, rounds in found.items():
        medians = (f"{statistics.median(each):.0f}" for each in zip(*rounds, strict=True))
        print(f"| {name} | " + " | ".join(medians) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
