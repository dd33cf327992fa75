"""This project's side of `training.py`. Argument: shape (JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worker import median_seconds, serve  # noqa: E402

from mesh_transformer import CausalTransformer, load_config, make_mesh, optimizer, parameters  # noqa: E402
from mesh_transformer.cross_entropy import weighted_loss  # noqa: E402
from mesh_transformer.fused_attention import causal_attention  # noqa: E402
from mesh_transformer.mesh import find_devices  # noqa: E402


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def seconds(function: Any, *arrays: Any) -> float:
    compiled = jax.jit(function)
    return median_seconds(lambda: jax.block_until_ready(compiled(*arrays)))


def per_shard(network: CausalTransformer, function: Any) -> Any:
    """`function` of whole arrays as one shard of the (1, 1) mesh sees them: its collectives want the axes' names."""
    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(function, mesh=network.mesh, in_specs=whole, out_specs=whole)


def parts(network: CausalTransformer, batch: int) -> dict[str, Any]:
    """Seconds of the step's parts, each alone, and the speed of a large matrix product."""
    model = network.model
    tokens = batch * model.seq
    big = normal(2048, 2048)
    heads = normal(batch, model.n_heads, model.seq, model.d_head)
    attention = jax.grad(lambda q, k, v: (causal_attention(q, k, v) * v).sum(), (0, 1, 2))
    target = jnp.zeros(tokens, jnp.int32)
    share = jnp.full(tokens, 1.0 / tokens)
    loss = lambda h, w, b: weighted_loss(h, w, b, target, share, model.logit_chunk, "reference")[0]  # noqa: E731
    head = per_shard(network, jax.grad(loss, (0, 1, 2)))
    head_seconds = seconds(
        head, normal(tokens, model.d_model), normal(model.d_model, model.n_vocab), normal(model.n_vocab)
    )
    return {
        "matmul_flops_per_second": 2 * 2048**3 / seconds(lambda a: a @ a, big),
        "attention_of_all_layers_seconds": model.layers * seconds(per_shard(network, attention), heads, heads, heads),
        "output_head_and_loss_seconds": head_seconds,
        "optimizer_seconds": optimizer_seconds(network),
    }


def optimizer_seconds(network: CausalTransformer) -> float:
    decay = parameters.decay_mask(network.model, 1)
    gradient = jax.tree.map(lambda x: x * 1e-3, network.state.params)
    norm = lambda tree: jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    update = jax.jit(
        lambda state, g: optimizer.apply(state, g, norm(g), 1, network.config.optim, decay).state, donate_argnums=0
    )

    def work() -> None:
        network.state = jax.block_until_ready(update(network.state, gradient))

    return median_seconds(work)


def main() -> None:
    shape = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    config = load_config({
        "layers": shape["layers"], "d_model": shape["d_model"], "n_heads": shape["n_heads"], "seq": shape["seq"],
        "n_vocab": shape["n_vocab"], "pe_rotary_dims": shape["rotary"], "per_replica_batch": shape["batch"],
        "lr": 1e-4, "weight_decay": 0, "warmup_steps": 0, "total_steps": 100, "compute_dtype": "float32",
        "train_set": "none.index",
    })  # fmt: skip
    network = CausalTransformer(config, make_mesh(config, find_devices(count=1)))
    tokens = np.random.default_rng(0).integers(0, shape["n_vocab"], (1, shape["batch"], shape["seq"] + 1))
    batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}

    def step() -> None:
        float(network.train(batch)["loss"])
        jax.block_until_ready(network.state)

    def versions() -> dict[str, Any]:
        return {"python": sys.version.split()[0], "jax": jax.__version__}

    serve(step, {"versions": versions, "parts": lambda: parts(network, shape["batch"])})


if __name__ == "__main__":
    main()
