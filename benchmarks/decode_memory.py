"""Memory that decoding needs on one TPU chip, from the compiler alone: no TPU is needed, the extra `plan` is.

    python benchmarks/decode_memory.py [--layers 28] [--d-model 4096] [--batches 1 16] [--topology v6e:1x1]

Compiles what generation runs, for bfloat16 weights of GPT-J's shape, a prompt of 64 tokens and 128 new ones, and prints
the peak of both programs: reading the prompts, and the loop over tokens. A copy of the weights in float32, or of any
kind, would show.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

PROMPT, NEW, SEQ = 64, 128, 2048


def chip(topology: str) -> Any:
    """One device of a topology that need not be there."""
    from jax.experimental import topologies

    more = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices[0]


def measure(device: Any, layers: int, d_model: int, batch: int) -> dict[str, float]:
    """GB: of the weights, of the rows (their cache above all), and the peaks of the two programs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mesh_transformer import decoding, generation, load_config, parameters, weight_products
    from mesh_transformer.decoder_weights import Weights
    from mesh_transformer.mesh import DP, MP
    from mesh_transformer.sampler import sampler_of

    model = load_config({
        "layers": layers, "d_model": d_model, "n_heads": 16, "n_vocab": 50400, "seq": SEQ, "pe_rotary_dims": 64,
        "compute_dtype": "bfloat16", "remat": "full", "lr": 1e-4, "total_steps": 1, "train_set": "none.index",
    }).model  # fmt: skip
    mesh = jax.sharding.Mesh(np.asarray([device]).reshape(1, 1), (DP, MP))
    kinds = parameters.kinds(model, 1)
    weights = Weights(parameters.tree((k, jax.ShapeDtypeStruct(k.shape, jnp.bfloat16)) for k in kinds), None)
    sampler = sampler_of({"temp": 0}, batch)
    mode = generation.mode_of(sampler)
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    rows_of = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), sampler)
    prompts = decoding.Prompts(ids(batch, PROMPT), ids(batch), ids(batch), ids(batch, 1), rows_of)
    with weight_products.compiling_for("tpu"):
        slots = decoding.cache_bucket(PROMPT + NEW - 1, SEQ)
        read = jax.jit(decoding.prefill_step(model, mesh, slots, mode)).lower(weights, prompts, ids())
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), read.out_info[0])
        loop = jax.jit(decoding.decode_steps(model, mesh, mode), donate_argnums=1).lower(weights, rows, ids(), ids())
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e9  # noqa: E731
    peaks = [each.compile().memory_analysis().peak_memory_in_bytes / 1e9 for each in (read, loop)]
    return {"weights": size(weights), "rows": size(rows), "prompts": peaks[0], "tokens": peaks[1]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="texts at once (1 16)")
    parser.add_argument("--topology", default="v6e:1x1", help="as jax names it (v6e:1x1)")
    options = parser.parse_args(arguments)
    from mesh_transformer.planning import exact

    path = exact.library()
    if path is None:
        print("error: there is no libtpu here: python scripts/install_compiler.py", file=sys.stderr)
        return 2
    # The compiler's library would look for the machine's own TPUs.
    settings = {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ |= settings | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v6e-1", exact.LIBRARY: path}
    device = chip(options.topology)
    print(
        "| texts | weights GB | rows GB | peak reading prompts | peak in the loop |\n|---|---|---|---|---|", flush=True
    )
    for batch in options.batches:
        found = measure(device, options.layers, options.d_model, batch)
        print(f"| {batch} | " + " | ".join(f"{value:.2f}" for value in found.values()) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
