"""Peak memory and step time against sequence length: rematerialisation, attention in tiles and the loss in chunks,
beside plain forms of both.

python benchmarks/memory.py [--lengths 512 2048 8192] [--rounds 3] [--remats none dots full] [--vocabulary 32768]

One device, one sequence a step. Memory is the compiled step's: its arguments and what it needs besides. The plain
attention, which has the whole [S, S] matrix of each head in memory, exists only here. The loss is measured with a
vocabulary of its own, `--vocabulary`, since with a small one logits are never the most there is. Each line is printed
when it is measured; the longest plain ones take a minute each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer import CausalTransformer, fused_attention, load_config, make_mesh, steps  # noqa: E402
from mesh_transformer.mesh import choose_platform, find_devices  # noqa: E402
from mesh_transformer.transformer_shard import train_step  # noqa: E402

CHUNK = 512
SHAPE = {"layers": 2, "d_model": 128, "n_heads": 2, "n_vocab": 1024, "pe_rotary_dims": 32}
TILED = fused_attention.causal_attention


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(K), causal) v, [B, h, S, K], with all scores in memory."""
    scores = jnp.einsum("bhtk,bhTk->bhtT", q / math.sqrt(q.shape[-1]), k)
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    return jnp.einsum("bhtT,bhTk->bhtk", jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), v)


def measure(length: int, remat: str, attention: str, loss: str, rounds: int, n_vocab: int) -> tuple[float, float]:
    """MiB of the compiled step, and its median seconds."""
    fused_attention.causal_attention = plain_attention if attention == "plain" else TILED
    train_step.cache_clear()
    config = load_config({
        **SHAPE, "n_vocab": n_vocab, "seq": length, "remat": remat,
        "logit_chunk": CHUNK if loss == "chunks" else length,
        "compute_dtype": "float32", "lr": 1e-4, "total_steps": 10,
        "train_set": "none.index",
    })  # fmt: skip
    network = CausalTransformer(config, make_mesh(config, find_devices(count=1)))
    tokens = np.random.default_rng(0).integers(0, n_vocab, (1, 1, length + 1)).astype(np.int32)
    batch: Any = steps.Batch(tokens[..., :-1], tokens[..., 1:], np.ones((1, 1, length), np.float32))
    placed = steps.place(network.mesh, steps.BATCH_SPEC, batch)
    program = train_step(network.model, config.optim, network.mesh).lower(network.state, placed).compile()
    memory, seconds, state = program.memory_analysis(), [], network.state
    for _ in range(rounds + 1):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program(state, placed))
        seconds.append(time.perf_counter() - start)
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20, statistics.median(seconds[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each (default 3)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="of the rows that compare losses (default 32768)")
    parser.add_argument("--remats", nargs="+", default=["none", "dots", "full"], choices=["none", "dots", "full"])
    options = parser.parse_args(arguments)
    choose_platform("cpu", 1)
    print(f"jax {jax.__version__}; {', '.join(f'{key} {value}' for key, value in SHAPE.items())}; medians")
    print("| S | vocabulary | attention | loss | remat | MiB | s |\n|---|---|---|---|---|---|---|", flush=True)
    small = SHAPE["n_vocab"]
    cases = [(small, attention, "chunks", remat) for attention in ("tiles", "plain") for remat in options.remats]
    cases += [(options.vocabulary, "tiles", loss, "dots") for loss in ("chunks", "whole")]
    for length in options.lengths:
        for n_vocab, attention, loss, remat in cases:
            mib, seconds = measure(length, remat, attention, loss, options.rounds, n_vocab)
            print(f"| {length} | {n_vocab} | {attention} | {loss} | {remat} | {mib:.0f} | {seconds:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
