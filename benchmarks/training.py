"""Training tokens/s of this project beside Hugging Face GPT-J on torch, on this machine's CPU.

python benchmarks/training.py [--rounds 7] [--python PATH] [--no-peer] [--output FILE]

Both train the same GPT-J shape on the same tokens in float32: loss, gradient, clip by global norm, Adam. Each runs in a
process of its own that waits while the other works; steps alternate, and medians are compared. The peer gets all cores,
no checkpointing, and the fastest of {eager, sdpa} attention x {foreach, fused} Adam, tried in the same run.
`--python` runs this project's side under another interpreter (another jax).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from process import Worker  # noqa: E402

SHAPE = {"layers": 8, "d_model": 512, "n_heads": 8, "n_vocab": 16384, "seq": 512, "batch": 4, "rotary": 64}
PEERS = [(a, o) for a in ("sdpa", "eager") for o in ("fused", "foreach")]


def matmul_flops(shape: dict[str, int]) -> float:
    """Floating-point operations of a step's matrix products: 6 per weight and token, attention over the causal half."""
    tokens = shape["batch"] * shape["seq"]
    weights = shape["layers"] * 12 * shape["d_model"] ** 2 + shape["d_model"] * shape["n_vocab"]
    attention = shape["layers"] * 2 * shape["d_model"] * shape["seq"] / 2
    return 6.0 * tokens * (weights + attention)


def fastest_peer(rounds: int) -> tuple[Worker, dict[str, float]]:
    """The peer's four variants, alternating; the one with the lowest median goes on."""
    workers = {f"{a}, {o}": Worker(sys.executable, "torch_worker.py", json.dumps(SHAPE), a, o) for a, o in PEERS}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        worker.ask("step")  # allocations and autotuning
    for _ in range(rounds):
        for name, worker in workers.items():
            seconds[name].append(worker.ask("step")["seconds"])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    for name, worker in workers.items():
        if name != best:
            worker.close()
    return workers[best], medians


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokens = SHAPE["batch"] * SHAPE["seq"]
    ours = Worker(options.python, "our_worker.py", json.dumps(SHAPE))
    result: dict[str, Any] = {"shape": SHAPE, "rounds": options.rounds, "versions": ours.ask("versions")}
    peer = None
    if not options.no_peer:
        peer, result["peer_variants_seconds"] = fastest_peer(max(3, options.rounds // 2))
        result["versions"] |= peer.ask("versions")
    for worker in filter(None, (ours, peer)):
        worker.ask("step")
        worker.ask("reset_peak")
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        seconds["ours"].append(ours.ask("step")["seconds"])
        if peer:
            seconds["peer"].append(peer.ask("step")["seconds"])
    for name, worker in (("ours", ours), ("peer", peer)):
        if worker is None:
            continue
        median = statistics.median(seconds[name])
        peak = worker.ask("peak")
        result[name] = {"seconds": seconds[name], "tokens_per_second": tokens / median, **peak}
    parts = ours.ask("parts")
    flops = matmul_flops(SHAPE)
    limit_seconds = flops / parts["matmul_flops_per_second"]
    result["parts_seconds"] = {k: v for k, v in parts.items() if k.endswith("_seconds")}
    result["matmul_gflops_per_second"] = parts["matmul_flops_per_second"] / 1e9
    result["fraction_of_matmul_limit"] = limit_seconds / statistics.median(seconds["ours"])
    if peer:
        result["ratio"] = result["ours"]["tokens_per_second"] / result["peer"]["tokens_per_second"]
    for worker in filter(None, (ours, peer)):
        worker.close()
    return result


def report(result: dict[str, Any]) -> str:
    lines = [f"{', '.join(f'{k} {v}' for k, v in result['versions'].items())}"]
    for name in ("ours", "peer"):
        if name in result:
            row = result[name]
            lines.append(
                f"{name}: {row['tokens_per_second']:.0f} tokens/s, step peak {row['peak_mib']:.0f} MiB resident "
                f"({row['step_mib']:.0f} MiB above the state at rest)"
            )
    for name, value in result.get("peer_variants_seconds", {}).items():
        lines.append(f"  peer with {name}: {value:.2f} s a step")
    lines.append(
        f"matmul {result['matmul_gflops_per_second']:.0f} GFLOP/s; the step runs at "
        f"{result['fraction_of_matmul_limit']:.2f} of what that would allow"
    )
    lines += [f"  {name.removesuffix('_seconds')}: {value:.3f} s" for name, value in result["parts_seconds"].items()]
    if "ratio" in result:
        lines.append(f"ratio ours / peer: {result['ratio']:.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each side (default 7)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of this project's side")
    parser.add_argument("--no-peer", action="store_true", help="measure this project alone")
    parser.add_argument("--output", help="write all figures as JSON")
    options = parser.parse_args(arguments)
    result = measure(options)
    print(report(result))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
