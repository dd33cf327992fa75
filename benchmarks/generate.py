"""Generated tokens/s and time to the first token beside transformers' `generate` on torch, on this machine's CPU.

python benchmarks/generate.py [--rounds 5] [--small] [--output FILE]

Both continue the same prompts greedily with the same weights in float32: GPT-J shape, prompt 64, 128 new tokens, one
text and eight at once. Each runs in a process of its own that waits while the other works; runs alternate, and medians
are compared. The peer gets all cores and, for each batch, the fastest of {eager, sdpa} attention x {dynamic, static}
cache, tried in the same run. This project runs on one device and, split by heads (mp 2), on two simulated ones, a core
each. Compilation is left out. That both sides give the same tokens is checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from process import Worker  # noqa: E402

SHAPE = {
    "layers": 8, "d_model": 512, "n_heads": 8, "n_vocab": 16384, "seq": 512, "rotary": 64, "prompt": 64, "count": 128,
}  # fmt: skip
SMALL = SHAPE | {"layers": 2, "d_model": 64, "n_vocab": 256, "rotary": 8, "prompt": 8, "count": 8}
BATCHES = (1, 8)
PEERS = [f"{a} {c}" for a, c in itertools.product(("eager", "sdpa"), ("dynamic", "static"))]
OURS = ("1", "2")  # devices


def peer_figures(worker: Worker, batch: int) -> tuple[float, float, Any]:
    """Seconds of the whole, seconds to the first token, and the tokens."""
    whole, first = worker.ask(f"generate {batch}"), worker.ask(f"first {batch}")
    return whole["seconds"], first["seconds"], whole["tokens"]


def our_figures(worker: Worker, batch: int) -> tuple[float, float, Any]:
    found = worker.ask(f"generate {batch}")
    return found["seconds"], found["first"], found["tokens"]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of rows whose tokens are the same: sums in another order may turn a tie over, and the text with it."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def measure(rounds: int, shape: dict[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ours = {name: Worker(sys.executable, "our_generator.py", json.dumps(shape), name, folder) for name in OURS}
        exported = ours["1"].ask("export")["folder"]
        peers = {
            name: Worker(sys.executable, "torch_generator.py", json.dumps(shape), exported, *name.split())
            for name in PEERS
        }
        versions = ours["1"].ask("versions") | peers[PEERS[0]].ask("versions")
        result: dict[str, Any] = {"shape": shape, "rounds": rounds, "versions": versions, "batches": {}}
        for batch in BATCHES:
            result["batches"][batch] = _one_batch(batch, rounds, shape["count"], ours, peers)
        for worker in (*ours.values(), *peers.values()):
            worker.close()
    return result


def _one_batch(
    batch: int, rounds: int, count: int, ours: dict[str, Worker], peers: dict[str, Worker]
) -> dict[str, Any]:
    for worker in ours.values():
        our_figures(worker, batch)  # compiles
    tried = {name: [peer_figures(worker, batch)[0] for _ in range(3)][1:] for name, worker in peers.items()}
    medians = {name: statistics.median(times) for name, times in tried.items()}
    best = min(medians, key=medians.__getitem__)
    runs: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in (*ours, "peer")}
    for _ in range(rounds):
        for name, worker in ours.items():
            runs[name].append(our_figures(worker, batch))
        runs["peer"].append(peer_figures(peers[best], batch))
    tokens = batch * count
    rows = {
        name: {
            "tokens_per_second": tokens / statistics.median(seconds for seconds, _, _ in found),
            "first_seconds": statistics.median(first for _, first, _ in found),
            "seconds": [seconds for seconds, _, _ in found],
        }
        for name, found in runs.items()
    }
    fastest = max(ours, key=lambda name: rows[name]["tokens_per_second"])
    return {
        **rows, "peer_variants_seconds": medians, "peer_variant": best, "fastest": fastest,
        "ratio": rows[fastest]["tokens_per_second"] / rows["peer"]["tokens_per_second"],
        "first_ratio": rows[fastest]["first_seconds"] / rows["peer"]["first_seconds"],
        "same_texts": min(agreement(runs[name][0][2], runs["peer"][0][2]) for name in ours),
    }  # fmt: skip


def report(result: dict[str, Any]) -> str:
    lines = [", ".join(f"{k} {v}" for k, v in result["versions"].items())]
    for batch, row in result["batches"].items():
        lines.append(f"batch {batch}:")
        for name, label in (
            *((name, f"this project, {name} device(s)") for name in OURS),
            ("peer", row["peer_variant"]),
        ):
            speed, first = row[name]["tokens_per_second"], row[name]["first_seconds"]
            lines.append(f"  {label}: {speed:.1f} tokens/s, first token after {1000 * first:.1f} ms")
        for name, seconds in row["peer_variants_seconds"].items():
            lines.append(f"    peer with {name}: {seconds:.2f} s")
        lines.append(
            f"  ratio of tokens/s {row['ratio']:.2f} ({row['fastest']} device(s)), of times to the first token "
            f"{row['first_ratio']:.2f}; {row['same_texts']:.0%} of the texts are the same"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--small", action="store_true", help="a tiny model: whether everything runs")
    parser.add_argument("--output", help="write all figures as JSON")
    options = parser.parse_args(arguments)
    result = measure(options.rounds, SMALL if options.small else SHAPE)
    print(report(result))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
