"""Golden parity, training and decoding speed on whatever single accelerator is here: one script, inside 8 minutes.

python benchmarks/accelerator.py [--deadline 480] [--sizes 125M 1.3B 6B] [--steps 5] [--batches 1 16] [--output FILE]

Needs only jax, dm-haiku, optax and numpy, and this repository as it lies. First the 2021 library's checkpoints are
evaluated on the device; then each size trains (bfloat16 compute, float32 masters and Adam) with each choice of
rematerialisation, and generates from bfloat16 weights, in a process of its own, so that one that does not fit is
reported and hurts no other. Stops by itself at the deadline and prints tables. On CPU the sizes are tiny; the code is
the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

GOLDEN = ROOT / "tests" / "data" / "golden"
GOLDEN_CASES = ["v1_rotary_mp1_f32", "v1_rotary_mp4_f32", "v1_t5_mp2_f32", "v1_rmsnorm-bias_mp2_f32"]
PARITY = 1e-4
# layers, d_model, heads, sequences of a microbatch; vocabulary 50400 and sequence 2048 throughout
SIZES = {"125M": (12, 768, 12, 16), "1.3B": (24, 2048, 16, 8), "6B": (28, 4096, 16, 4)}
DECODED = (64, 128)  # tokens of a prompt, and behind it
DECODING = 0.4  # share of the time that training leaves to decoding
MOST_GB = {"6B": 22.4}  # what decoding may take: this model once ran in that much
TINY = {"125M": (2, 64, 4, 2), "1.3B": (3, 64, 4, 2), "6B": (4, 64, 4, 2)}
REMATS = ("dots", "full")


def run_child(arguments: list[str], seconds: float) -> dict[str, Any]:
    """This script with `arguments`, in a process of its own; its last line is JSON; says what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=max(seconds, 1)
        )
    except subprocess.TimeoutExpired:
        return {"error": "stopped at the deadline"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = (done.stdout + done.stderr).strip().splitlines()
    memory = next((line for line in said if "RESOURCE_EXHAUSTED" in line or "out of memory" in line.lower()), None)
    if memory or done.returncode == -9:
        return {"error": "does not fit in memory", "detail": (memory or "killed")[:300]}
    return {"error": (said[-1] if said else f"exit status {done.returncode}")[:300]}


def parity(cases: Sequence[str]) -> dict[str, Any]:
    """Largest difference of the golden losses on this device, in float32, {case: difference}."""
    import jax

    # TPUs and GPUs multiply float32 in fewer bits unless told otherwise, which parity is not about.
    jax.config.update("jax_default_matmul_precision", "highest")
    import numpy as np

    from mesh_transformer import CausalTransformer, load_config, parameters, steps
    from mesh_transformer.mesh import find_devices, make_mesh

    worst = {}
    for case in cases:
        given = json.loads((GOLDEN / case / "config.json").read_text())
        shards = given["cores_per_replica"]
        given |= {"cores_per_replica": 1, "compute_dtype": "float32", "total_steps": 1, "train_set": "none.index"}
        config = load_config(given)
        network = CausalTransformer(config, make_mesh(config, find_devices(count=1)))
        folder = next((GOLDEN / case).glob("slim_step_[1-9]*"))
        leaves = parameters.published_leaves(config.model, shards)
        files = [[np.load(folder / f"shard_{m}" / f"{j}.npz") for j in range(16)] for m in range(shards)]
        arrays = [[z[name] for z in of_shard for name in z.files][: len(leaves)] for of_shard in files]
        merged: dict[Any, dict[Any, Any]] = {}
        for i, leaf in enumerate(leaves):
            merged.setdefault(leaf.kind, {})[leaf.layer] = leaf.kind.merge_parts([shard[i] for shard in arrays])
        tree = parameters.tree(
            (kind, np.stack([v[i] for i in range(config.model.layers)]) if kind.stacked else v[None])
            for kind, v in merged.items()
        )
        placed = steps.place(network.mesh, parameters.specs(config.model, 1), tree)
        network.state = network.state._replace(params=placed)
        golden = np.load(GOLDEN / case / "eval.npz")
        tokens = golden["tokens"]
        out = network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
        worst[case] = float(np.abs(np.asarray(out["all_loss"]) - golden["all_loss"]).max())
    return {"parity": worst, "device": jax.devices()[0].device_kind, "platform": jax.devices()[0].platform}


def train(size: str, remat: str, steps_wanted: int) -> dict[str, Any]:
    """Compile time, tokens/s, MFU and peak memory of one size."""
    import jax
    import numpy as np

    from mesh_transformer import CausalTransformer, load_config, parameters
    from mesh_transformer.mesh import find_devices, make_mesh
    from mesh_transformer.training import throughput

    device = find_devices(count=1)[0]
    small = device.platform == "cpu"
    layers, d_model, heads, rows = (TINY if small else SIZES)[size]
    vocabulary, seq = (512, 64) if small else (50400, 2048)
    config = load_config({
        "layers": layers, "d_model": d_model, "n_heads": heads, "n_vocab": vocabulary, "seq": seq,
        "pe_rotary_dims": min(64, d_model // heads), "per_replica_batch": rows, "compute_dtype": "bfloat16",
        "remat": remat, "lr": 1e-4, "total_steps": 100, "train_set": "none.index",
    })  # fmt: skip
    network = CausalTransformer(config, make_mesh(config, [device]))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, rows, seq + 1))
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}

    def step() -> float:
        start = time.perf_counter()
        loss = float(network.train(batch)["loss"])
        jax.block_until_ready(network.state)
        assert np.isfinite(loss)
        return time.perf_counter() - start

    first = step()
    times = [step() for _ in range(steps_wanted)]
    median = statistics.median(times)
    peak = throughput.peak_flops(device.device_kind)
    flops = throughput.flops_per_token(network.model) * rows * seq / median
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "parameters": parameters.count(config.model),
        "sequences": rows,
        "compile_seconds": first - median,
        "tokens_per_second": rows * seq / median,
        "mfu": flops / peak if peak else None,
        "peak_gib": memory / 2**30 if memory else None,
    }


def decode(size: str, batch: int) -> dict[str, Any]:
    """Generated tokens/s, time to the first token and peak memory of one size, greedy, weights in bfloat16 alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mesh_transformer import CausalTransformer, load_config, parameters
    from mesh_transformer.generation import Stream
    from mesh_transformer.mesh import find_devices, make_mesh
    from mesh_transformer.sampler import sampler_of
    from mesh_transformer.state import TrainState

    device = find_devices(count=1)[0]
    small = device.platform == "cpu"
    layers, d_model, heads, _ = (TINY if small else SIZES)[size]
    vocabulary, prompt, count = (512, 16, 16) if small else (50400, *DECODED)
    config = load_config({
        "layers": layers, "d_model": d_model, "n_heads": heads, "n_vocab": vocabulary, "seq": 2048,
        "pe_rotary_dims": min(64, d_model // heads), "per_replica_batch": 1, "compute_dtype": "bfloat16",
        "lr": 1e-4, "total_steps": 100, "train_set": "none.index",
    })  # fmt: skip
    network = CausalTransformer(config, make_mesh(config, [device]))
    # Drawn in bfloat16 one after the other: float32 weights of the largest size would be the peak.
    draw = jax.jit(
        lambda key, shape, scale: scale * jax.random.normal(key, shape, jnp.bfloat16),
        static_argnums=(1, 2),
    )
    kinds = parameters.kinds(network.model, 1)
    params = parameters.tree(
        (
            kind,
            draw(jax.random.key(i), kind.shape, kind.init)
            if kind.random
            else jnp.full(kind.shape, kind.init, "bfloat16"),
        )
        for i, kind in enumerate(kinds)
    )
    network.state = TrainState(params, None, jnp.int32(0))
    prompts = np.random.default_rng(0).integers(0, vocabulary, (batch, prompt)).tolist()

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        work = Stream(
            network.model, network.mesh, network.weights, prompts, [count] * batch, sampler_of({"temp": 0}, batch),
            [()] * batch,
        )  # fmt: skip
        next(work)
        first = time.perf_counter() - start
        assert sum(len(tokens) for piece in work for tokens in piece.tokens) == batch * (count - 1)
        return first, time.perf_counter() - start

    run()
    first, whole = sorted(run() for _ in range(3))[1]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "parameters": parameters.count(config.model), "first_ms": 1000 * first,
        "tokens_per_second": batch * (count - 1) / (whole - first), "peak_gib": memory / 2**30 if memory else None,
        "peak_gb": memory / 1e9 if memory else None,
    }  # fmt: skip


def show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def decode_table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the sizes that generated."""
    lines = ["| size | texts | parameters | tokens/s | first token, ms | peak GB |", "|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['size']} | {row['batch']} "
        if "error" in row:
            lines.append(f"{head}| {row['error']} | | | |")
            continue
        peak, most = row["peak_gb"], MOST_GB.get(row["size"])
        above = f", above {most}" if peak and most and peak > most else ""
        lines.append(
            f"{head}| {row['parameters']:,} | {show(row['tokens_per_second'], 0)} | {show(row['first_ms'], 1)} "
            f"| {show(peak, 2)}{above} |"
        )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the trained sizes."""
    lines = ["| size | remat | parameters | tokens/s | MFU | peak GiB | compile s |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['size']} | {row['remat']} "
        if "error" in row:
            lines.append(f"{head}| {row['error']} | | | | |")
            continue
        lines.append(
            f"{head}| {row['parameters']:,} | {show(row['tokens_per_second'], 0)} | {show(row['mfu'], 3)} "
            f"| {show(row['peak_gib'], 1)} | {show(row['compile_seconds'], 1)} |"
        )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    end = time.monotonic() + options.deadline
    left = lambda: end - time.monotonic()  # noqa: E731
    found = run_child(["--parity", "--cases", *options.cases], left())
    print(json.dumps(found), flush=True)
    kept = DECODING * options.deadline if options.batches else 0
    training = [{"size": size, "remat": remat} for size in options.sizes for remat in options.remats]
    decoding = [{"size": size, "batch": batch} for size in options.sizes for batch in options.batches]
    steps = ["--steps", str(options.steps)]
    trained = each(training, "--train", steps, lambda: left() - kept, options.reserve)
    return {**found, "rows": trained, "decoded": each(decoding, "--decode", [], left, options.reserve)}


def each(
    asked: list[dict[str, Any]], flag: str, more: list[str], left: Callable[[], float], reserve: float
) -> list[dict[str, Any]]:
    """The asked rows, and what a child with `flag` and their values found, as long as there is time."""
    rows = []
    for row in asked:
        found: dict[str, Any] = {"error": "no time left before the deadline"}
        if left() >= reserve:
            found = run_child([flag, *map(str, row.values()), *more], left() - 5)
        rows.append(row | found)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=480, help="seconds for everything (default 480)")
    parser.add_argument("--reserve", type=float, default=30, help="seconds that must be left to start another size")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--remats", nargs="+", choices=["none", *REMATS], default=list(REMATS))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each size (default 5)")
    parser.add_argument("--output", help="write all figures as JSON")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16], help="texts at once to decode (1 16)")
    parser.add_argument(
        "--cases", nargs="+", choices=GOLDEN_CASES, default=GOLDEN_CASES, help="golden checkpoints (all)"
    )
    parser.add_argument("--parity", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--decode", nargs=2, metavar=("SIZE", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=2, metavar=("SIZE", "REMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.decode:
        print(json.dumps(decode(options.decode[0], int(options.decode[1]))))
        return 0
    if options.parity or options.train:
        print(json.dumps(parity(options.cases) if options.parity else train(*options.train, options.steps)))
        return 0
    result = measure(options)
    print(
        f"\n{result.get('platform')}: {result.get('device')}; golden losses differ by at most {result.get('parity')}\n"
    )
    print(table(result["rows"]) + "\n\n" + decode_table(result["decoded"]))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    wrong = "error" in result or max(result["parity"].values()) > PARITY  # a size that does not fit is a finding
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
